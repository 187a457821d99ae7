"""Evaluations of a trained model that `jaxtrain.evaluate` writes in addition to the metrics."""
