"""Compiled programs: cache key, shapes, memory and FLOPs."""
