"""Compiled programs: the state at the start, the training step (loss, gradients, update, guards), evaluation."""
