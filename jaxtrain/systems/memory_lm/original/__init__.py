"""Compatibility with the original memory transformer project: its config files, names, checkpoints and schedules."""
