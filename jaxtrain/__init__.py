"""Train in JAX, live in PyTorch. The public names load when first used."""

from typing import TYPE_CHECKING

from jaxtrain.lazy import lazy_attributes
from jaxtrain.runtime import plugin_messages

if TYPE_CHECKING:  # what a type checker and an editor read; `_NAMES` is what Python loads
    from jaxtrain.compiled_step import compile, compile_many
    from jaxtrain.config import TrainingConfig
    from jaxtrain.config_io import load_config
    from jaxtrain.errors import UserError
    from jaxtrain.graphs import pad_graphs
    from jaxtrain.metrics import WholeSplit
    from jaxtrain.runtime.launch import setup_distributed
    from jaxtrain.task import Loss, Statistics, Task
    from jaxtrain.train.trainer import Trainer
    from jaxtrain.tuning.sweep import sweep
else:
    _NAMES = {
        "train.trainer": ("Trainer",),
        "config": ("TrainingConfig",),
        "config_io": ("load_config",),
        "task": ("Task", "Loss", "Statistics"),
        "errors": ("UserError",),
        "compiled_step": ("compile", "compile_many"),
        "graphs": ("pad_graphs",),
        "metrics": ("WholeSplit",),
        "runtime.launch": ("setup_distributed",),
        "tuning.sweep": ("sweep",),
    }
    __getattr__ = lazy_attributes(__name__, _NAMES)

__all__ = [
    "Loss",
    "Statistics",
    "Task",
    "Trainer",
    "TrainingConfig",
    "UserError",
    "WholeSplit",
    "compile",
    "compile_many",
    "load_config",
    "pad_graphs",
    "setup_distributed",
    "sweep",
]

plugin_messages.hide_where_no_gpu_is()


def __dir__() -> list[str]:
    return __all__
