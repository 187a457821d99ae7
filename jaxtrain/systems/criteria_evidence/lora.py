"""Low-rank adapters on an encoder's projections, under peft's keys. Source: Hu et al. 2021."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import nn
from jaxtrain.config import Section
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from torch_bridge.lazy_array import LazyArray

ADAPTER = "default"  # peft's name for the only adapter


class Lora(Section):
    enabled: bool = False
    r: int = 8
    alpha: int = 16
    dropout: float = 0.1
    targets: tuple[str, ...] | None = None  # names of Linear layers; query and value (DeBERTa: *_proj) if left out

    def target_names(self, encoder: Encoder) -> tuple[str, ...]:
        if self.targets:
            return self.targets
        return ("query_proj", "value_proj") if encoder.kind == "deberta" else ("query", "value")


class LoraLinear(nnx.Module):
    """base_layer(x) + alpha / r * B A dropout(x). B starts at 0, so training starts from the plain encoder."""

    def __init__(self, base: nn.Linear, config: Lora, *, rngs: nnx.Rngs):
        out_features, in_features = base.weight.shape
        self.base_layer = base
        self.lora_A = nnx.Dict({ADAPTER: nn.Linear(in_features, config.r, bias=False, rngs=rngs)})
        self.lora_B = nnx.Dict({ADAPTER: nn.Linear(config.r, out_features, bias=False, rngs=rngs)})
        self.lora_B[ADAPTER].weight.set_value(jnp.zeros((out_features, config.r)))
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.alpha / config.r

    def __call__(self, x, rngs=None):
        low = self.lora_A[ADAPTER](self.dropout(x, rngs))
        return self.base_layer(x) + self.scale * self.lora_B[ADAPTER](low)


class PeftEncoder(nnx.Module):
    """An encoder under the two prefixes that peft gives it: base_model.model."""

    def __init__(self, encoder: nnx.Module):
        self.base_model = Holder(encoder)

    def __call__(self, *arguments, **named):
        return self.base_model.model(*arguments, **named)


class Holder(nnx.Module):
    def __init__(self, model: nnx.Module):
        self.model = model


def add_lora(encoder: nnx.Module, config: Lora | None, sizes: Encoder, *, rngs: nnx.Rngs) -> nnx.Module:
    """The encoder with adapters on its targets; the encoder itself without a config, or one that is not enabled.

    Raises UserError where no layer has a target's name.
    """
    if config is None or not config.enabled:
        return encoder
    targets = config.target_names(sizes)
    found: set[str] = set()
    for _, module in list(nnx.iter_modules(encoder)):
        for name in targets:
            layer = vars(module).get(name)
            if isinstance(layer, nn.Linear):
                setattr(module, name, LoraLinear(layer, config, rngs=rngs))
                found.add(name)
    if set(targets) - found:
        absent = ", ".join(sorted(set(targets) - found))
        raise UserError(f"model.lora.targets: no Linear layer of the encoder is called {absent}")
    return PeftEncoder(encoder)


def is_adapter(key: str) -> bool:
    return ".lora_A." in key or ".lora_B." in key


def _sum(weight, up, down, scale: float) -> np.ndarray:
    """weight + scale * up down, in float32, in the weight's dtype."""
    weight, up, down = (np.asarray(value) for value in (weight, up, down))
    return (weight.astype(np.float32) + scale * up.astype(np.float32) @ down.astype(np.float32)).astype(weight.dtype)


def merge(state: dict, scale: float) -> dict:
    """A state dict without adapters that does the same, computed as it is read: peft's `merge_and_unload`."""
    merged = {}
    for key, value in state.items():
        if is_adapter(key):
            continue
        plain = key.replace("base_model.model.", "", 1).replace(".base_layer.", ".")
        stem = key.removesuffix(".base_layer.weight")
        if stem != key:
            down, up = state[f"{stem}.lora_A.{ADAPTER}.weight"], state[f"{stem}.lora_B.{ADAPTER}.weight"]
            value = LazyArray(value.shape, np.dtype(value.dtype), functools.partial(_sum, value, up, down, scale))
        merged[plain] = value
    return merged
