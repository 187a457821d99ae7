"""Compatibility with the original PSY agents project: its config files, names, checkpoints and schedules."""
