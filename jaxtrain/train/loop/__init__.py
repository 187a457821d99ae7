"""The training loop: cadence, early stopping."""
