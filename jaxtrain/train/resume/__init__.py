"""Identify the run that a folder holds, and find the checkpoint that a run resumes from."""
