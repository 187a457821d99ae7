"""Metrics of a run: console, files, TensorBoard, Weights & Biases, MLflow."""
