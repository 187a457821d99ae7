"""The Sherlock autoencoders: film, sound and text in, brain activity predicted, film reconstructed."""

from jaxtrain.systems.fmri_autoencoder.config import Data, Gen1Options, HeadOptions, LossOptions
from jaxtrain.systems.fmri_autoencoder.data import build_data
from jaxtrain.systems.fmri_autoencoder.task import (
    build_model,
    finish,
    loss,
    outputs,
    schedule,
    statistics,
)
from jaxtrain.task import Task

COMMON = {
    "build_model": build_model,
    "build_data": build_data,
    "loss": loss,
    "outputs": outputs,
    "statistics": statistics,
    "finish": finish,
    "schedule": schedule,
    "couples_samples": True,
}

TASKS = {
    "gen1": Task(
        sections={"model": Gen1Options, "loss": LossOptions, "data": Data}, tiny_config="sherlock_gen1_tiny", **COMMON
    ),
    "head": Task(
        sections={"model": HeadOptions, "loss": LossOptions, "data": Data}, tiny_config="sherlock_head_tiny", **COMMON
    ),
}
