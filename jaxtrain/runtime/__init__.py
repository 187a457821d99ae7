"""Processes, mesh and sharding, precision, random keys, compile cache, launch environment. Knows no model."""
