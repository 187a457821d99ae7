"""Searches that train: learning-rate range test, populations of runs in one program."""
