"""Low-rank updates of frozen linear layers, under the keys of two torch projects. Source: Hu et al. 2021.

`LoRALinear` keeps its factors beside the weight (lora_A, lora_B); `PeftLinear` wraps the layer as peft does
(base_layer, lora_A.default, lora_B.default).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.linear import layer, linear
from jaxtrain.nn.scopes import named

PEFT_ADAPTER = "default"  # peft's name for the only adapter


class LoRALinear(nnx.Module):
    """y = x W^T + b + (drop(x) A^T) B^T alpha / rank. weight, bias: those of the replaced layer; lora_A: [rank, in];
    lora_B: [out, rank], initially zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0, *, rngs: nnx.Rngs):
        out, into = base.weight.shape
        self.weight = base.weight
        self.bias = base.bias if base.bias is not None else None
        bound = 1 / math.sqrt(into)  # kaiming_uniform with a = sqrt(5)
        self.lora_A = nnx.Param(initializers.uniform(rngs.params(), (rank, into), bound))
        self.lora_B = nnx.Param(jnp.zeros((out, rank)))
        self.scale = alpha / rank
        self.dropout = dropout
        self.merged = False

    @named
    def __call__(self, x, rngs=None):
        y = layer(x, self.weight[...], None if self.bias is None else self.bias[...])
        if self.merged:
            return y
        update = linear(linear(dropout(x, self.dropout, rngs), self.lora_A[...]), self.lora_B[...])
        return y + (update * self.scale).astype(y.dtype)

    @property
    def update(self):
        """Return the update that merging adds to the weight: [out, in]."""
        return (self.lora_B[...].astype(jnp.float32) @ self.lora_A[...].astype(jnp.float32)) * self.scale

    def merge(self) -> None:
        """Add the update to the weight, once; the layer then uses only the weight. An embedding that was tied to the
        weight is not changed."""
        if not self.merged:
            self.weight = nnx.Param((self.weight[...] + self.update).astype(self.weight.dtype))
            self.merged = True

    def unmerge(self) -> None:
        if self.merged:
            self.weight = nnx.Param((self.weight[...] - self.update).astype(self.weight.dtype))
            self.merged = False


class PeftLinear(nnx.Module):
    """base_layer(x) + alpha / rank * B A dropout(x). B is initially 0, so training starts from the plain layer."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0, *, rngs: nnx.Rngs):
        out, into = base.weight.shape
        self.base_layer = base
        self.lora_A = nnx.Dict({PEFT_ADAPTER: nn.Linear(into, rank, bias=False, rngs=rngs)})
        self.lora_B = nnx.Dict({PEFT_ADAPTER: nn.Linear(rank, out, bias=False, rngs=rngs)})
        self.lora_B[PEFT_ADAPTER].weight.set_value(jnp.zeros((out, rank)))
        self.dropout = nn.Dropout(dropout)
        self.scale = alpha / rank

    @named
    def __call__(self, x, rngs=None):
        low = self.lora_A[PEFT_ADAPTER](self.dropout(x, rngs))
        return self.base_layer(x) + self.scale * self.lora_B[PEFT_ADAPTER](low)


def named_layers(
    module: nnx.Module, kind: type, prefix: str = ""
) -> Iterator[tuple[str, nnx.Module | nnx.List, str | int, nnx.Module]]:
    """Yield (dotted name, parent, attribute or index, layer) of every `kind`, in the order of torch's named_modules."""
    items = enumerate(list(module)) if isinstance(module, nnx.List) else list(vars(module).items())
    for name, child in items:
        if isinstance(name, str) and name.startswith("_pytree__"):
            continue
        dotted = f"{prefix}{name}"
        if isinstance(child, kind):
            yield dotted, module, name, child
        elif isinstance(child, nnx.Module | nnx.List):
            yield from named_layers(child, kind, dotted + ".")


def replace_linears(
    module: nnx.Module, chosen: Callable[[str], bool], make: Callable[[nn.Linear], nnx.Module]
) -> list[str]:
    """Replace every Linear below `module` whose dotted name is `chosen` by make(layer); return the names."""
    found: list[tuple[str, Any, Any, Any]] = [e for e in named_layers(module, nn.Linear) if chosen(e[0])]
    for _, parent, name, base in found:
        if isinstance(parent, nnx.List):
            parent[name] = make(base)
        else:
            setattr(parent, str(name), make(base))
    return [name for name, *_ in found]


def merged_weight(weight, down, up, scale: float) -> np.ndarray:
    """Return weight [out, in] + scale * up [out, rank] @ down [rank, in]: summed in float32, in the weight's dtype."""
    weight, down, up = (np.asarray(value) for value in (weight, down, up))
    return (weight.astype(np.float32) + scale * (up.astype(np.float32) @ down.astype(np.float32))).astype(weight.dtype)
