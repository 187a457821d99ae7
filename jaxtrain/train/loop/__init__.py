"""The training loop: cadence, early stopping, callbacks, rehearsal."""
