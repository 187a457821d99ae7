"""Compute gradients as DistributedDataParallel does: per device from its own rows, then one all-reduce of a vector."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from jaxtrain.runtime.mesh import BATCH_AXES, Layout
from jaxtrain.task import Loss, MeanLoss
from jaxtrain.train.step.state import Arrays, TrainState

# (state, batch or its parts, random key, loss scale, numbers) -> gradients, Loss, buffers, tokens
Compute = Callable[[TrainState, Any, jax.Array, jax.Array, Arrays], tuple[Arrays, Loss, Arrays, jax.Array]]


def per_device(compute: Compute, layout: Layout, mean_of_means: bool) -> Compute:
    """Return a function that runs `compute` on each device's rows with a random key per device. BatchNorm or a
    contrastive loss sees only the device's rows. Traced.

    Gradients, loss and parts are averaged over the devices by weight (plain means if mean_of_means), weight and tokens
    are summed; buffers are the first device's. Source: Li et al. 2020 (PyTorch Distributed), sec. 3.2 and 4.1, which
    takes plain means; these are equal if all devices' rows have the same weight.
    """

    def own_rows(state: TrainState, batch: Any, rng: jax.Array, scale: jax.Array, numbers: Arrays) -> Any:
        device = jax.lax.axis_index(BATCH_AXES)
        grads, loss, buffers, tokens = compute(state, batch, jax.random.fold_in(rng, device), scale, numbers)
        share = share_of(loss, mean_of_means)
        by_share = jax.tree.map(lambda x: share * x.astype(jnp.float32), (grads, loss.value, loss.parts))
        firsts = jax.tree.map(lambda x: jnp.where(device == 0, x, 0).astype(jnp.float32), _pieces(buffers))
        joined, taken_apart = ravel_pytree((by_share, firsts, share, loss.weight, tokens))
        sums, firsts, shares, weight, tokens = taken_apart(jax.lax.psum(joined, BATCH_AXES))
        shares = jnp.maximum(shares, jnp.finfo(jnp.float32).tiny)
        means = jax.tree.map(lambda x, like: (x / shares).astype(like.dtype), sums, (grads, loss.value, loss.parts))
        return means[0], loss._replace(value=means[1], weight=weight, parts=means[2]), _whole(firsts, buffers), tokens

    rows = P(None, BATCH_AXES)  # of leaves [micro_batch, sample, ...]
    return jax.shard_map(
        own_rows, mesh=layout.mesh, in_specs=(P(), rows, P(), P(), P()), out_specs=P(), check_vma=False
    )


def share_of(loss: Loss, mean_of_means: bool) -> jax.Array:
    """Return the weight of a micro-batch, or of a device's rows, in the mean: 1 for plain means and MeanLoss."""
    return jnp.float32(1) if mean_of_means or isinstance(loss, MeanLoss) else loss.weight


def _pieces(buffers: Arrays) -> dict[str, Any]:
    """Split 32- and 64-bit integers into 16-bit pieces, which float32 holds exactly; the highest first."""

    def cut(x: jax.Array) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.integer) or x.dtype.itemsize < 4:
            return x
        with jax.enable_x64(x.dtype.itemsize == 8):
            low = [(x >> bit & 0xFFFF).astype(jnp.int32) for bit in range(0, 8 * x.dtype.itemsize - 16, 16)]
            return ((x >> 8 * x.dtype.itemsize - 16).astype(jnp.int32), *reversed(low))

    return {key: cut(value) for key, value in buffers.items()}


def _whole(pieces: dict[str, Any], like: Arrays) -> Arrays:
    def join(value: Any, dtype: Any) -> jax.Array:
        if not isinstance(value, tuple):
            return value.astype(dtype)
        with jax.enable_x64(dtype.itemsize == 8):
            return functools.reduce(lambda high, low: (high << 16) + low, [piece.astype(dtype) for piece in value])

    return {key: join(value, like[key].dtype) for key, value in pieces.items()}
