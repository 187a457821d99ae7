"""Lookups of rows in a table, one by one or reduced in bags."""

import jax
import jax.numpy as jnp

from jaxtrain.nn.rows import rows as look_up
from torch_bridge.lowering.table import lowering


@lowering("embedding.default")
def embedding(call, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """Look up rows. `padding_idx` gets no gradient; with scale_grad_by_freq a row that occurs n times gets 1/n of
    it."""
    rows = look_up(weight, indices, "clip")
    part = 1.0 if not scale_grad_by_freq else 1 / jnp.take(_counts(weight, indices), indices, mode="clip")
    if padding_idx >= 0:
        part = jnp.where(indices == padding_idx, 0, part)
    return rows if isinstance(part, float) else _gradient_times(rows, part)


def _counts(weight, indices):
    return jnp.zeros(weight.shape[0], jnp.float32).at[indices.reshape(-1)].add(1)


def _gradient_times(rows, part):
    part = part[..., None].astype(rows.dtype)
    still = jax.lax.stop_gradient(rows)
    return still + part * (rows - still)


SUM, MEAN, MAX = range(3)


@lowering("_embedding_bag.default", "_embedding_bag_forward_only.default")
def embedding_bag(
    call,
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    """Reduce the rows of each bag. indices: [n]; offsets: where each bag begins. Returns the bags, then values that
    only torch's backward pass uses. An empty bag gives 0; `padding_idx` counts in no bag."""
    bags = offsets.shape[0] - bool(include_last_offset)
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(indices.shape[0]), side="right") - 1
    rows = embedding(call, weight, indices, padding_idx, scale_grad_by_freq)
    real = indices != padding_idx
    count = jnp.zeros(bags, jnp.int32).at[bag].add(real)
    if mode == MAX:
        lowest = jnp.full((bags, weight.shape[1]), -jnp.inf, weight.dtype)
        top = lowest.at[bag].max(jnp.where(real[:, None], rows, -jnp.inf))
        result = jnp.where(count[:, None] > 0, top, 0)
    else:
        scale = real.astype(rows.dtype) if per_sample_weights is None else jnp.where(real, per_sample_weights, 0)
        result = jnp.zeros((bags, weight.shape[1]), weight.dtype).at[bag].add(rows * scale[:, None])
        if mode == MEAN:
            result = result / jnp.maximum(count, 1)[:, None].astype(result.dtype)
    return result, bag, count, jnp.zeros_like(count)


@lowering("embedding_renorm.default")
def embedding_renorm(call, weight, indices, max_norm, norm_type):
    """Return the table, with the used rows scaled down to `max_norm` where they are longer."""
    length = jnp.linalg.norm(weight, ord=norm_type, axis=1)
    used = jnp.zeros(weight.shape[0], bool).at[indices.reshape(-1)].set(True)
    scale = jnp.where(used & (length > max_norm), max_norm / (length + 1e-7), 1)
    return weight * scale[:, None].astype(weight.dtype)
