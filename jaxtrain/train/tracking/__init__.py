"""Log a run's metrics: console, files, TensorBoard, Weights & Biases, MLflow."""
