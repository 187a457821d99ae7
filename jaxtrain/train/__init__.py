"""How to train: state, step, trainer, evaluation, checkpoint, tracking, early stopping. Imports no system."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "init_from":  # where scripts know it
        return importlib.import_module("jaxtrain.train.checkpoint.init_from")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
