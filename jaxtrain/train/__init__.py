"""How to train: state, step, trainer, evaluation, checkpoint, tracking, early stopping. Imports no system."""
