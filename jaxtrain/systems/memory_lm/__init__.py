"""Decoders that read a learned memory: from scratch, or as an adapter of a pretrained model; LoRA; generation."""

import importlib

from jaxtrain.systems.memory_lm.config import Data, LossSection, Memory, Model
from jaxtrain.task import Task, TorchTwin


def _later(module: str, name: str):
    """A function of a module of this folder, imported when it is first called."""

    def call(*arguments):
        return getattr(importlib.import_module(f"jaxtrain.systems.memory_lm.{module}"), name)(*arguments)

    call.__name__ = name
    return call


def _task(model: str, tiny_config: str, **more) -> Task:
    return Task(
        sections={"model": Model, "memory": Memory, "loss": LossSection, "data": Data},
        build_model=_later(model, "build_model"),
        build_data=_later("data", "build_data"),
        loss=_later("losses", "loss"),
        outputs=_later("losses", "outputs"),
        statistics=_later("losses", "statistics"),
        finish=_later("losses", "finish"),
        trainable=_later("grouping", "trainable"),
        param_group=_later("grouping", "param_group"),
        report=_later("reports", "report"),
        twin=TorchTwin(
            build=_later("torch_twin", "build"), call=_later("torch_twin", "call"), loss=_later("torch_twin", "loss")
        ),
        couples_samples=True,  # the router's balance terms look at the whole micro-batch
        tiny_config=tiny_config,
        **more,
    )


TASKS = {
    "scratch": _task("model", "memory_lm_micro"),
    "adapter": _task("adapter", "memory_lm_adapter_tiny", initial_weights=_later("pretrained", "initial_weights")),
}


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(importlib.import_module("jaxtrain.systems.memory_lm.torch_compat"), name)
