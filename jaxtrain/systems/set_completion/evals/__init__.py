"""Evaluation reports of a trained model: the files that `jaxtrain.evaluate` writes next to the metrics."""
