"""Low-rank updates of frozen linear layers. Source: Hu et al. 2021."""

import math

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.linear import linear


class LoRALinear(nnx.Module):
    """y = x W^T + b + (drop(x) A^T) B^T alpha / rank. weight, bias: those of the layer it replaces; lora_A: [rank, in];
    lora_B: [out, rank], zero at the start."""

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

    def __call__(self, x, rngs=None):
        y = linear(x, self.weight[...], None if self.bias is None else self.bias[...])
        if self.merged:
            return y
        update = linear(linear(dropout(x, self.dropout, rngs), self.lora_A[...]), self.lora_B[...])
        return y + (update * self.scale).astype(y.dtype)

    @property
    def update(self):
        """What merging adds to the weight: [out, in]."""
        return (self.lora_B[...].astype(jnp.float32) @ self.lora_A[...].astype(jnp.float32)) * self.scale

    def merge(self) -> None:
        """Add the update to the weight, once; the layer then computes with the weight alone. An embedding that was tied
        to it stays as it is."""
        if not self.merged:
            self.weight = nnx.Param((self.weight[...] + self.update).astype(self.weight.dtype))
            self.merged = True

    def unmerge(self) -> None:
        if self.merged:
            self.weight = nnx.Param((self.weight[...] - self.update).astype(self.weight.dtype))
            self.merged = False


def named_linears(module: nnx.Module, prefix: str = ""):
    """(dotted name, parent, attribute or index, layer) of every Linear, in the order of torch's named_modules."""
    items = enumerate(list(module)) if isinstance(module, nnx.List) else list(vars(module).items())
    for name, child in items:
        if isinstance(name, str) and name.startswith("_pytree__"):
            continue
        dotted = f"{prefix}{name}"
        if isinstance(child, nn.Linear):
            yield dotted, module, name, child
        elif isinstance(child, nnx.Module | nnx.List):
            yield from named_linears(child, dotted + ".")


def apply_lora(module: nnx.Module, memory, *, rngs: nnx.Rngs) -> list[str]:
    """Replace every Linear whose dotted name contains one of `lora_targets`; the names replaced."""
    found = [entry for entry in named_linears(module) if any(t in entry[0] for t in memory.lora_targets)]
    for _, parent, name, base in found:
        layer = LoRALinear(base, memory.lora_rank, memory.lora_alpha, memory.lora_dropout, rngs=rngs)
        if isinstance(parent, nnx.List):
            parent[name] = layer
        else:
            setattr(parent, name, layer)
    return [name for name, *_ in found]


def lora_layers(module: nnx.Module, prefix: str = ""):
    """(dotted name, LoRALinear) of every replaced layer."""
    items = enumerate(list(module)) if isinstance(module, nnx.List) else list(vars(module).items())
    for name, child in items:
        if isinstance(name, str) and name.startswith("_pytree__"):
            continue
        if isinstance(child, LoRALinear):
            yield f"{prefix}{name}", child
        elif isinstance(child, nnx.Module | nnx.List):
            yield from lora_layers(child, f"{prefix}{name}.")
