"""Interface of the original H-JEPA project: config files, names, checkpoints, schedules."""
