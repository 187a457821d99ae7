"""The base model of an adapter: its folder, and its weights one array at a time."""

import pathlib
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxtrain import hub
from jaxtrain.errors import UserError
from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.systems.memory_lm.adapter import backbone_config, build_model
from torch_bridge.layouts import named_variables


def folder_of(name: str) -> pathlib.Path:
    """The folder of a local path or of a hub id. Raises UserError where neither is there."""
    return hub.folder_of(name, "model.base_model_name")


def initial_weights(config) -> Mapping[str, Any] | None:
    """The base model's weights under the adapter's keys, still in their files; None where it starts from random ones.

    Raises UserError where the folder lacks a weight of the model.
    """
    if config.model.base_model_name is None:
        return None
    from torch_bridge import files

    weights = files.open_weights(folder_of(config.model.base_model_name))
    state = {f"base_model.{name}": leaf for name, leaf in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if backbone_config(config.model).tied and "base_model.model.embed_tokens.weight" in state:
        state.setdefault("base_model.lm_head.weight", state["base_model.model.embed_tokens.weight"])
    missing = [key for key in base_keys(config) if key not in state]
    if missing:
        raise UserError(f"{config.model.base_model_name}: {len(missing)} weights missing, as {', '.join(missing[:3])}")
    return state


def base_keys(config) -> list[str]:
    """Keys of the base model's own weights."""
    model = nnx.eval_shape(lambda: build_model(config, initial_rngs(0)))
    keys = [key for key, _ in named_variables(model) if key.startswith("base_model.")]
    return [key for key in keys if not key.endswith((".lora_A", ".lora_B"))]
