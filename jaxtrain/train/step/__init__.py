"""The compiled work on a batch: training step (loss, gradients, update, guards) and evaluation."""
