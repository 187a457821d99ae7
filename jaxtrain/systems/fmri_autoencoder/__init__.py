"""The Sherlock autoencoders: film, sound and text in, brain activity predicted, film reconstructed."""

TASKS = {}
