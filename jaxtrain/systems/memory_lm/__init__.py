"""Decoder language models that read a learned memory: from scratch, or as an adapter of a pretrained model."""

from jaxtrain.lazy import lazy, lazy_attributes
from jaxtrain.systems.memory_lm.config import Data, LossSection, Memory, Model, Optim
from jaxtrain.systems.memory_lm.original.legacy_config import ORIGINAL
from jaxtrain.task import Task, TorchTwin


def _task(model: str, kind: str, **more) -> Task:
    return Task(
        sections={"model": Model, "memory": Memory, "loss": LossSection, "data": Data, "optim": Optim},
        build_model=lazy(f"jaxtrain.systems.memory_lm.{model}:build_model"),
        build_data=lazy("jaxtrain.systems.memory_lm.data:build_data"),
        example=lazy("jaxtrain.systems.memory_lm.data:example"),
        loss=lazy("jaxtrain.systems.memory_lm.losses:loss"),
        outputs=lazy("jaxtrain.systems.memory_lm.losses:outputs"),
        eval_statistics=lazy("jaxtrain.systems.memory_lm.losses:eval_statistics"),
        compute=lazy("jaxtrain.systems.memory_lm.losses:compute"),
        histograms=lazy("jaxtrain.systems.memory_lm.losses:histograms"),
        trainable=lazy("jaxtrain.systems.memory_lm.param_groups:trainable"),
        param_group=lazy("jaxtrain.systems.memory_lm.param_groups:param_group"),
        schedule=lazy("jaxtrain.systems.memory_lm.original.schedules:schedule"),
        report=lazy("jaxtrain.systems.memory_lm.evals.report:report"),
        describe=lazy("jaxtrain.systems.memory_lm.flops:describe"),
        twin=TorchTwin(
            build=lazy("jaxtrain.systems.memory_lm.torch_twin:build"),
            call=lazy("jaxtrain.systems.memory_lm.torch_twin:call"),
            loss=lazy("jaxtrain.systems.memory_lm.torch_twin:loss"),
            hf=lazy("jaxtrain.systems.memory_lm.exports:hugging_face"),
            hf_files=lazy("jaxtrain.systems.memory_lm.data:tokenizer_files"),
            checkpoint=lazy("jaxtrain.systems.memory_lm.original.checkpoint_files:write"),
            folders={
                "peft": lazy("jaxtrain.systems.memory_lm.exports:peft_folder"),
                "original": lazy("jaxtrain.systems.memory_lm.exports:original_checkpoint"),
            },
        ),
        splits_tokens=lazy(f"jaxtrain.systems.memory_lm.sequence:{kind}"),
        shard_rules=lazy(f"jaxtrain.systems.memory_lm.shard_rules:{kind}"),
        couples_samples=True,  # the router's balance losses depend on the whole micro-batch
        traced_hparams=(
            "seed",
            "model.dropout",
            "model.attention_dropout",
            "memory.memory_dropout",
            "memory.lora_dropout",
        ),
        original=ORIGINAL,
        **more,
    )


TASKS = {
    "scratch": _task("model", "scratch"),
    "adapter": _task(
        "adapter",
        "adapter",
        initial_weights=lazy("jaxtrain.systems.memory_lm.adapter:initial_weights"),
    ),
}


ORIGINAL_NAMES = {
    "original.datasets": ("TextDataset", "create_dataloader"),
    "original.inference_routers": ("create_inference_router",),
    "original.legacy_config": ("TrainingConfig",),
    "original.torch_compat": (
        "configure_tokenizer_special_ids",
        "get_memory_bank_assignments",
        "get_memory_layer_indices",
        "load_config",
        "save_config",
    ),
    "original.torch_generation": ("generate", "generate_batch"),
    "original.torch_models": (
        "Config",
        "MemoryAdapter",
        "MemoryConfig",
        "MemoryTransformer",
        "ModelConfig",
        "extract_memory_weights",
        "merge_adapter_weights",
        "quantize_memory_for_deployment",
    ),
    "original.torch_parts": (
        "ChapterRouter",
        "LoRALinear",
        "MemoryCrossAttention",
        "compute_router_auxiliary_loss",
        "compute_total_router_loss",
    ),
    "original.trainer": ("Trainer",),
    "torch_memory": (
        "ChapteredMemoryBank",
        "FactorizedMemoryBank",
        "MemoryBank",
        "QuantizedMemoryBank",
        "ReducedDimMemoryBank",
    ),
}
__getattr__ = lazy_attributes(__name__, ORIGINAL_NAMES)
