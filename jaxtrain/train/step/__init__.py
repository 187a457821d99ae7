"""Compiled functions: initial state, training step (loss, gradients, update, guards) and evaluation."""
