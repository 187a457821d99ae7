"""Compatibility with the original SplatNLP project: its config files, names, checkpoints and schedules."""
