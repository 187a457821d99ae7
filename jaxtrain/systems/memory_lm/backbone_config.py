"""Read the config.json of a Llama-like decoder from Hugging Face."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

SUPPORTED = ("qwen2", "qwen3", "llama", "mistral")


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """Sizes and options of a decoder. windows: each layer's sliding attention window in tokens, None for unlimited."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool  # Qwen3 normalises queries and keys
    windows: tuple[int | None, ...]
    inv_freq: tuple[float, ...]
    attention_scale: float  # of cos and sin, for YaRN
    max_length: int

    @property
    def hidden_dim(self) -> int:
        return self.hidden_size


def read_config(config: Mapping[str, Any]) -> BackboneConfig:
    """Return the decoder config from a config.json's content. Raises UserError for an unsupported model_type."""
    values = {key: value for key, value in config.items() if value is not None}
    kind = values.get("model_type")
    if kind not in SUPPORTED:
        raise UserError(f"base model: model_type {kind!r} is not supported; wanted one of {', '.join(SUPPORTED)}")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    layers = values["num_hidden_layers"]
    head = values.get("head_dim", 128 if kind == "qwen3" else hidden // heads)
    bias = values.get("attention_bias", False)
    length = values.get("max_position_embeddings", 32768)
    frequencies, scale = inverse_frequencies(values, head, length)
    defaults = {"qwen2": heads, "qwen3": heads, "llama": heads, "mistral": 8}
    return BackboneConfig(
        model_type=kind,
        vocab_size=values["vocab_size"],
        hidden_size=hidden,
        intermediate_size=values["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        kv_heads=values.get("num_key_value_heads", defaults[kind]),
        head_dim=head,
        norm_eps=values.get("rms_norm_eps", 1e-6),
        activation=values.get("hidden_act", "silu"),
        tied=values.get("tie_word_embeddings", False),
        qkv_bias=True if kind == "qwen2" else bias and kind != "mistral",
        out_bias=bias and kind in ("llama", "qwen3"),
        mlp_bias=values.get("mlp_bias", False) and kind == "llama",
        head_norms=kind == "qwen3",
        windows=_windows(values, kind, layers),
        inv_freq=tuple(float(f) for f in frequencies),
        attention_scale=scale,
        max_length=length,
    )


def load_config_file(folder: str | pathlib.Path) -> dict[str, Any]:
    """Return the content of a local folder's config.json. Raises UserError if there is none."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"model.base_model_name: {folder} has no config.json; wanted a folder of Hugging Face weights")
    return json.loads(path.read_text())


def _windows(values: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    size = values.get("sliding_window")
    if kind == "llama" or size is None:
        return (None,) * layers
    if kind == "mistral":
        return (size,) * layers
    if "layer_types" in values:
        return tuple(size if one == "sliding_attention" else None for one in values["layer_types"])
    if not values.get("use_sliding_window", False):
        return (None,) * layers
    first = values.get("max_window_layers", 28)
    return tuple(size if layer >= first else None for layer in range(layers))


def inverse_frequencies(values: Mapping[str, Any], head: int, length: int) -> tuple[np.ndarray, float]:
    """Return the rotary frequencies [head / 2] and the scale of cos and sin, by the model's RoPE scaling.

    Raises UserError for an unknown rope_type. Sources: Su et al. 2021; Llama 3 (Meta 2024); YaRN (Peng et al. 2023).
    """
    rope = dict(values.get("rope_scaling") or {}) | dict(values.get("rope_parameters") or {})
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = theta ** (-np.arange(0, head, 2, dtype=np.float32) / np.float32(head))
    base = base.astype(np.float32)
    if kind == "default":
        return base, 1.0
    factor = rope.get("factor", 1.0)
    original = rope.get("original_max_position_embeddings", length)
    if kind == "linear":
        return base / np.float32(factor), 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wavelengths = 2 * math.pi / base
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * base / factor + smooth * base).astype(np.float32), 1.0
    if kind == "yarn":
        return _yarn(base, rope, theta, head, factor, original)
    raise UserError(f"base model: rope_type {kind!r} is not supported; wanted default, linear, llama3 or yarn")


def _yarn(base: np.ndarray, rope: Mapping[str, Any], theta: float, head: int, factor: float, original: int):
    turns = lambda count: head * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta))
    low, high = turns(rope.get("beta_fast", 32)), turns(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head - 1)
    ramp = np.clip((np.arange(head // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return (base / factor * ramp + base * (1 - ramp)).astype(np.float32), float(scale)
