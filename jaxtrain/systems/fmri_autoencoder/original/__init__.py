"""The Sherlock project as its users know it: config files, names, checkpoints, schedules."""
