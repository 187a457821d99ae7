"""Train in JAX, live in PyTorch. The public names load when first used."""

import importlib

_NAMES = {
    "Trainer": "jaxtrain.train.trainer",
    "TrainingConfig": "jaxtrain.config",
    "load_config": "jaxtrain.config_io",
    "Task": "jaxtrain.task",
    "Loss": "jaxtrain.task",
    "Statistics": "jaxtrain.task",
    "UserError": "jaxtrain.errors",
    "compile": "jaxtrain.compiled_step",
    "compile_many": "jaxtrain.compiled_step",
}
__all__ = list(_NAMES)


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")


def __dir__():
    return __all__
