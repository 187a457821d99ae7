"""Searches that train: the learning-rate range test, and populations of runs in one program."""
