"""Training: state, step, trainer, evaluation, checkpoints, tracking, early stopping. Imports no system."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "init_from":  # scripts import it from here
        return importlib.import_module("jaxtrain.train.checkpoint.init_from")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
