"""The Sherlock autoencoders: film, sound and text in, brain activity predicted, film reconstructed."""

import importlib

from jaxtrain.systems.fmri_autoencoder.config import Data, Gen1Options, HeadOptions, LesionOptions, LossOptions
from jaxtrain.systems.fmri_autoencoder.data import build_data
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import ORIGINAL
from jaxtrain.systems.fmri_autoencoder.task import (
    build_model,
    compute,
    eval_statistics,
    loss,
    outputs,
    schedule,
)
from jaxtrain.task import Task, TorchTwin


def _later(module: str, name: str):
    """A function of another file, imported at its first call: torch and the drawing libraries load late."""

    def call(*arguments):
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)(*arguments)

    return call


COMMON = {
    "build_model": build_model,
    "build_data": build_data,
    "loss": loss,
    "outputs": outputs,
    "eval_statistics": eval_statistics,
    "compute": compute,
    "schedule": schedule,
    "report": _later("report", "report"),
    "twin": TorchTwin(**{name: _later("torch_twin", name) for name in ("build", "call", "loss")}),
    "couples_samples": True,
    "original": ORIGINAL,
    "traced_hparams": (
        "seed",
        "model.encoder_dropout",
        "model.decoder_dropout",
        *(f"loss.{name}_weight" for name in ("reconstruction", "fmri", "video", "audio", "text")),
    ),
}

SECTIONS = {"loss": LossOptions, "data": Data, "lesion": LesionOptions}

TASKS = {
    "gen1": Task(sections={"model": Gen1Options, **SECTIONS}, tiny_config="sherlock_gen1_tiny", **COMMON),
    "head": Task(sections={"model": HeadOptions, **SECTIONS}, tiny_config="sherlock_head_tiny", **COMMON),
}

_LATER = {
    **dict.fromkeys(("SherlockDataset", "MultimodalDataset"), "datasets"),
    **dict.fromkeys(
        (
            "ReconstructionLoss",
            "FMRIMatchingLoss",
            "CombinedAutoEncoderLoss",
            "NormalizedReconstructionLoss",
            "NormalizedFMRIMatchingLoss",
            "NormalizedCombinedAutoEncoderLoss",
        ),
        "losses",
    ),
    **dict.fromkeys(("compute_correlation_metric", "compute_r2_score"), "metrics"),
    "SherlockAutoencoder": "gen1",
    "MultimodalAutoencoder": "head",
    **dict.fromkeys(("Lesion", "simulate", "effects"), "lesions"),
    **dict.fromkeys(
        (
            "Autoencoder",
            "Trainer",
            "TrainingConfig",
            "cleanup_distributed",
            "create_autoencoder",
            "prepare_for_distributed",
            "setup_distributed",
        ),
        "torch_compat",
    ),
}


def __getattr__(name: str):
    """The original's names; those of torch_compat.py import torch."""
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
