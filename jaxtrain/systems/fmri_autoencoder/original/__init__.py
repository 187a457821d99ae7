"""Interface of the original Sherlock project: config files, names, checkpoints, schedules."""
