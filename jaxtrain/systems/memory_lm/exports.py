"""Export trained weights for other libraries: Hugging Face and PEFT folders, and the original's checkpoints."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.nn.lora import merged_weight
from jaxtrain.systems.memory_lm.config import get_memory_layer_indices
from jaxtrain.systems.memory_lm.original.checkpoint_files import original_sections
from torch_bridge.lazy_array import LazyArray

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}


def hugging_face(config, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and weights for transformers.

    An adapter exports its base model with LoRA merged; a model from scratch without memory becomes a Llama. Raises
    UserError for a model with memory, because transformers has no class for it.
    """
    adapter = config.model.base_config is not None or config.model.base_model_name is not None
    return _adapter(config, state) if adapter else _scratch(config, state)


def _adapter(config, state):
    from jaxtrain.systems.memory_lm.adapter import config_json

    if any(key.startswith("memory_adapters.") for key in state):
        raise UserError(
            "--hf: the model reads a memory, which transformers has no class for; train with "
            "memory.use_memory_adapter=false, or take --output F.safetensors and the torch twin"
        )
    described = config_json(config.model)
    described.setdefault("architectures", [ARCHITECTURES[described["model_type"]]])
    if "base_model.lm_head.lora_A" in state:  # with LoRA merged, the head differs from the embedding
        described["tie_word_embeddings"] = False
    return described, merged(config, state)


def merged(config, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base model's weights under its own keys with every LoRA merged; merged weights are lazy."""
    scale = config.memory.lora_alpha / config.memory.lora_rank
    result = {}
    for key, weight in state.items():
        if not key.startswith("base_model.") or key.endswith((".lora_A", ".lora_B")):
            continue
        name = key.removesuffix(".weight")
        if f"{name}.lora_A" in state:
            read = functools.partial(merged_weight, weight, state[f"{name}.lora_A"], state[f"{name}.lora_B"], scale)
            weight = LazyArray(tuple(weight.shape), np.dtype(weight.dtype), read)
        result[key.removeprefix("base_model.")] = weight
    return result


def _scratch(config, state):
    model = config.model
    if get_memory_layer_indices(config.memory, model.num_layers):
        raise UserError(
            "--hf: the model reads a memory, which transformers has no class for; take --output F.safetensors"
        )
    if not (model.use_rope and model.use_rms_norm and model.hidden_activation == "swiglu"):
        raise UserError("--hf: only rotary positions, RMSNorm and swiglu make a Llama; take --output F.safetensors")
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_dim,
        "intermediate_size": model.intermediate_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
    }
    keep = {key: value for key, value in state.items() if not key.endswith("rotary.inv_freq")}
    return described, {key if key == "lm_head.weight" else f"model.{key}": value for key, value in keep.items()}


def peft_folder(
    config, state: Mapping[str, Any], folder: str | pathlib.Path, meta: Mapping[str, Any] | None = None
) -> pathlib.Path:
    """Write the LoRA as a PEFT folder: adapter_config.json and adapter_model.safetensors. meta: not used.

    Raises UserError without a LoRA, and for a model with memory, which PEFT cannot store.
    """
    from torch_bridge.files import peft

    if any(key.startswith("memory_adapters.") for key in state):
        raise UserError(
            "--format peft: the model reads a memory, which PEFT has no form for; train with memory.use_memory_adapter="
            "false, or take --output F.safetensors"
        )

    names = [key.removesuffix(".lora_A") for key in state if key.endswith(".lora_A")]
    if not names:
        raise UserError("there is no LoRA to export; train with memory.use_lora=true")
    weights = {}
    for name in names:
        for part in ("lora_A", "lora_B"):
            weights[f"{name.removeprefix('base_model.')}.{part}.weight"] = state[f"{name}.{part}"]
    memory = config.memory
    return peft.save_folder(
        folder,
        weights,
        rank=memory.lora_rank,
        alpha=memory.lora_alpha,
        dropout=memory.lora_dropout,
        targets=[name.removeprefix("base_model.") for name in names],
        base=config.model.base_model_name,
        task_type="CAUSAL_LM",
    )


def original_checkpoint(
    config, state: Mapping[str, Any], folder: str | pathlib.Path, meta: Mapping[str, Any]
) -> pathlib.Path:
    """Write a checkpoint folder of the original: model.safetensors, config.yaml, trainer_state.json.

    Tied weights are saved under both names, so the file loads with strict=True. meta: of the checkpoint (step,
    steps_per_epoch, metrics, best_metrics). Raises UserError for settings that the original does not have.
    """
    from omegaconf import OmegaConf

    from torch_bridge import files

    sections = original_sections(config)
    folder = pathlib.Path(folder)
    files.save(state, folder / "model.safetensors")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(sections)))
    progress = {
        "best_loss": meta["best_metrics"].get("loss"),
        "epoch": meta["step"] // meta["steps_per_epoch"],
        "global_step": meta["step"],
        "loss": meta["metrics"].get("loss"),
        "patience_counter": 0,
    }
    (folder / "trainer_state.json").write_text(json.dumps(progress, indent=2, sort_keys=True))
    return folder
