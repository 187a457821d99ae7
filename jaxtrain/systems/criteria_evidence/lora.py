"""Low-rank adapters (LoRA) on an encoder's projections, under peft's keys. Source: Hu et al. 2021."""

import functools

import numpy as np
from flax import nnx

from jaxtrain.config import Section
from jaxtrain.errors import UserError
from jaxtrain.nn.lora import PEFT_ADAPTER, PeftLinear, merged_weight, replace_linears
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from torch_bridge.lazy_array import LazyArray


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


class PeftEncoder(nnx.Module):
    """Wrapper that puts an encoder under peft's two key prefixes, base_model.model."""

    def __init__(self, encoder: nnx.Module):
        self.base_model = Holder(encoder)

    def __call__(self, *arguments, **named):
        return self.base_model.model(*arguments, **named)


class Holder(nnx.Module):
    def __init__(self, model: nnx.Module):
        self.model = model


def add_lora(encoder: nnx.Module, config: Lora | None, sizes: Encoder, *, rngs: nnx.Rngs) -> nnx.Module:
    """Return the encoder with adapters on its target layers; the encoder itself if LoRA is not configured or enabled.

    Raises UserError if no layer has a target's name.
    """
    if config is None or not config.enabled:
        return encoder
    targets = config.target_names(sizes)
    names = replace_linears(
        encoder,
        lambda name: name.rpartition(".")[2] in targets,
        lambda base: PeftLinear(base, config.r, config.alpha, config.dropout, rngs=rngs),
    )
    adapted = {name.rpartition(".")[2] for name in names}
    if set(targets) - adapted:
        absent = ", ".join(sorted(set(targets) - adapted))
        raise UserError(f"model.lora.targets: no Linear layer of the encoder is called {absent}")
    return PeftEncoder(encoder)


def is_adapter(key: str) -> bool:
    return ".lora_A." in key or ".lora_B." in key


def merge(state: dict, scale: float) -> dict:
    """Return a state dict with the adapters merged into the weights, like peft's `merge_and_unload`.

    Merged weights are lazy: each is computed when it is read.
    """
    merged = {}
    for key, value in state.items():
        if is_adapter(key):
            continue
        plain = key.replace("base_model.model.", "", 1).replace(".base_layer.", ".")
        stem = key.removesuffix(".base_layer.weight")
        if stem != key:
            down, up = state[f"{stem}.lora_A.{PEFT_ADAPTER}.weight"], state[f"{stem}.lora_B.{PEFT_ADAPTER}.weight"]
            value = LazyArray(
                value.shape, np.dtype(value.dtype), functools.partial(merged_weight, value, down, up, scale)
            )
        merged[plain] = value
    return merged
