"""The training step: loss, gradients, update, guards."""
