"""Compiled programs: their cache key, their shapes, their memory and operations."""
