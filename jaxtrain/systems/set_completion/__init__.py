"""SplatNLP's set completion model and the sparse autoencoder on its activations."""

TASKS = {}
