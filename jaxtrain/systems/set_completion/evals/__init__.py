"""Evaluations of a trained model: what `jaxtrain.evaluate` writes beside the metrics."""
