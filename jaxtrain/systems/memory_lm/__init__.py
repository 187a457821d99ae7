"""Decoders that read a learned memory: from scratch, or as an adapter of a pretrained model; LoRA; generation."""

import importlib

from jaxtrain.systems.memory_lm.config import Data, LossSection, Memory, Model, Optim
from jaxtrain.systems.memory_lm.original.legacy_config import ORIGINAL
from jaxtrain.task import Task, TorchTwin


def _later(module: str, name: str):
    """A function of a module of this folder, imported when it is first called."""

    def call(*arguments):
        return getattr(importlib.import_module(f"jaxtrain.systems.memory_lm.{module}"), name)(*arguments)

    call.__name__ = name
    return call


def _task(model: str, tiny_config: str, **more) -> Task:
    return Task(
        sections={"model": Model, "memory": Memory, "loss": LossSection, "data": Data, "optim": Optim},
        build_model=_later(model, "build_model"),
        build_data=_later("data", "build_data"),
        loss=_later("losses", "loss"),
        outputs=_later("losses", "outputs"),
        eval_statistics=_later("losses", "eval_statistics"),
        compute=_later("losses", "compute"),
        histograms=_later("losses", "histograms"),
        trainable=_later("grouping", "trainable"),
        param_group=_later("grouping", "param_group"),
        schedule=_later("grouping", "schedule"),
        report=_later("reports", "report"),
        describe=_later("flops", "describe"),
        twin=TorchTwin(
            build=_later("torch_twin", "build"),
            call=_later("torch_twin", "call"),
            loss=_later("torch_twin", "loss"),
            hf=_later("exports", "hugging_face"),
            hf_files=_later("data", "tokenizer_files"),
            folders={"peft": _later("exports", "peft_folder"), "original": _later("exports", "original_checkpoint")},
        ),
        couples_samples=True,  # the router's balance terms look at the whole micro-batch
        traced_hparams=(
            "seed",
            "model.dropout",
            "model.attention_dropout",
            "memory.memory_dropout",
            "memory.lora_dropout",
        ),
        original=ORIGINAL,
        tiny_config=tiny_config,
        **more,
    )


TASKS = {
    "scratch": _task("model", "memory_lm_micro"),
    "adapter": _task("adapter", "memory_lm_adapter_tiny", initial_weights=_later("pretrained", "initial_weights")),
}


FACADE = frozenset(  # names of the original, in torch_compat
    [
        "ChapterRouter",
        "ChapteredMemoryBank",
        "Config",
        "FactorizedMemoryBank",
        "LoRALinear",
        "MemoryAdapter",
        "MemoryBank",
        "MemoryConfig",
        "MemoryCrossAttention",
        "MemoryTransformer",
        "ModelConfig",
        "QuantizedMemoryBank",
        "ReducedDimMemoryBank",
        "TextDataset",
        "Trainer",
        "TrainingConfig",
        "compute_router_auxiliary_loss",
        "create_dataloader",
        "create_inference_router",
        "extract_memory_weights",
        "generate",
        "generate_batch",
        "get_memory_bank_assignments",
        "get_memory_layer_indices",
        "load_config",
        "merge_adapter_weights",
        "quantize_memory_for_deployment",
        "save_config",
    ]
)


def __getattr__(name: str):
    if name in FACADE:
        return getattr(importlib.import_module("jaxtrain.systems.memory_lm.original.torch_compat"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
