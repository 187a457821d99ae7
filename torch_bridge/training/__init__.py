"""Prepare a user's torch module and loss for training: find the batch entries that it takes, record the loss as one
graph."""
