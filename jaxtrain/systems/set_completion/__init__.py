"""SplatNLP: a set transformer that completes builds, and a sparse autoencoder that looks inside it."""

import importlib

from jaxtrain.systems.set_completion import features, losses, metrics
from jaxtrain.systems.set_completion.config import ModelConfig, SaeConfig, SetDataConfig
from jaxtrain.systems.set_completion.data import build_data, collate_sets
from jaxtrain.systems.set_completion.model import SetCompletionModel
from jaxtrain.task import Task, TorchTwin


def _twin(name: str):
    """A function of torch_twin.py, which imports torch, on its first call."""
    return _later("torch_twin", name)


def _later(module: str, name: str):
    def call(*arguments):
        return getattr(importlib.import_module(f"jaxtrain.systems.set_completion.{module}"), name)(*arguments)

    return call


TASKS = {
    "complete": Task(
        sections={"model": ModelConfig, "data": SetDataConfig},
        build_model=lambda config, rngs: SetCompletionModel(**config.model.arguments(), rngs=rngs),
        build_data=build_data,
        collate=collate_sets,
        loss=losses.loss,
        outputs=losses.outputs,
        eval_statistics=metrics.eval_statistics,
        compute=metrics.compute,
        report=_later("reports", "completion_report"),
        twin=TorchTwin(build=_twin("build"), call=_twin("call"), loss=_twin("loss")),
        traced_hparams=("seed", "model.dropout"),
        tiny_config="splat_tiny",
    ),
    "sae": Task(
        sections={"model": ModelConfig, "data": SetDataConfig, "sae": SaeConfig},
        build_model=features.build_model,
        build_data=build_data,
        collate=collate_sets,
        loss=features.loss,
        outputs=features.outputs,
        eval_statistics=features.eval_statistics,
        compute=features.compute,
        trainable=features.trainable,
        after_update=features.after_update,
        schedule=features.schedule,
        couples_samples=True,  # the loss is of the buffer's rows
        initial_weights=features.initial_weights,
        report=_later("reports", "feature_report"),
        twin=TorchTwin(**{part: _twin(f"{part}_features") for part in ("build", "call", "loss", "after_update")}),
        traced_hparams=("seed", "sae.l1_coefficient", "sae.usage_coefficient", "sae.target_usage"),
        tiny_config="splat_sae_tiny",
    ),
}

_COMPAT = (
    "ActivationBuffer",
    "DataLoader",
    "DistributedDataParallel",
    "EarlyStopping",
    "SetDataset",
    "SparseAutoencoder",
    "convert_ddp_state",
    "create_collate_fn",
    "fit",
    "save_artifacts",
    "train_epoch",
    "validate",
)


def __getattr__(name: str):
    """The original's names, from torch_compat.py, which imports torch."""
    if name in _COMPAT:
        return getattr(importlib.import_module(f"{__name__}.torch_compat"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
