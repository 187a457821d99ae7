"""Checkpoints of a run: atomic, verified, and readable by torch."""
