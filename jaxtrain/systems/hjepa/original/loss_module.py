"""Shared code of the original's losses."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_numpy, to_torch


def arrays_too(forward: Callable) -> Callable:
    """Decorate a loss's forward so that a call with JAX arrays gives JAX arrays of the same values.

    Raises UserError inside jax.grad, jit and vmap, where arrays have no values.
    """

    def tensor(leaf):
        if isinstance(leaf, jax.core.Tracer):
            raise UserError("a torch loss inside jax.grad, jit or vmap: take jaxtrain.systems.hjepa.losses there")
        return to_torch(np.asarray(leaf)) if isinstance(leaf, jax.Array) else leaf

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((args, kwargs))):
            return forward(self, *args, **kwargs)
        with torch.no_grad():
            args, kwargs = jax.tree.map(tensor, (args, kwargs))
            return {name: jnp.asarray(to_numpy(value)) for name, value in forward(self, *args, **kwargs).items()}

    return call


def to_rows(x, flatten_patches: bool = True):
    """Reshape [batch, token, width] to [batch * token, width], or [batch, token * width]; two axes pass through."""
    if x.ndim < 2:
        raise ValueError(f"features have shape {tuple(x.shape)}, wanted [row, width] or [batch, token, width]")
    if x.ndim == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if flatten_patches else x.reshape(len(x), -1)


def two_views(a, b, name: str):
    """Return the two views, or the halves of the only one. Raises ValueError for an odd batch or different shapes."""
    if b is None:
        if len(a) % 2:
            raise ValueError(f"{name}: one view of {len(a)} rows cannot be split into two halves; give an even batch")
        return a[: len(a) // 2], a[len(a) // 2 :]
    if a.shape != b.shape:
        raise ValueError(f"{name}: the views have shapes {tuple(a.shape)} and {tuple(b.shape)}, wanted equal ones")
    return a, b


def not_negative(**weights: float) -> None:
    """Raise ValueError, with its name, for a weight below 0."""
    for name, weight in weights.items():
        if weight < 0:
            raise ValueError(f"{name}={weight} must not be negative")


def of_levels(weights, levels: int, name: str) -> list[float]:
    """Return one number per level, from one for all or a list. Raises ValueError for no level, another length or a
    negative weight."""
    if levels < 1:
        raise ValueError(f"num_hierarchies={levels} must be at least 1")
    if isinstance(weights, (int, float)):
        weights = [weights] * levels
    if len(weights) != levels:
        raise ValueError(f"{name}: {len(weights)} weights for {levels} levels (num_hierarchies)")
    for value in weights:
        not_negative(**{name: value})
    return [float(value) for value in weights]


def over_levels(loss: Callable, weights: list[float], predictions, targets) -> dict:
    """Return the sum over levels of weight * loss(prediction, detached target), and each level's terms by name."""
    terms: dict = {}
    total = 0.0
    for level, (prediction, target) in enumerate(zip(predictions, targets, strict=True)):
        level_terms = loss(prediction, target.detach())
        total = total + weights[level] * level_terms["loss"]
        terms |= {f"{name}_h{level}": value for name, value in level_terms.items()}
    return terms | {"loss": total}
