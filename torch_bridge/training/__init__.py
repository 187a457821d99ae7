"""A user's torch module with its loss, for training: which batch entries it takes, its loss as one graph."""
