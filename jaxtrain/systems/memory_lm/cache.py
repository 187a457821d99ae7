"""Decoding state between calls, in arrays of fixed size so that a step compiles only once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import nn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Key-value cache and routing state.

    keys, values: by layer [batch, capacity, kv head, head width], keys after rotation. mask: bool [batch, capacity],
    False for padding. length: int32, tokens cached so far, padding included. routing: by memory layer, what its router
    pools over in later calls: a window of block inputs, or for prefix routing (sums, counts).
    """

    keys: tuple
    values: tuple
    mask: jax.Array
    length: jax.Array
    routing: dict[str, Any]


def empty_cache(layers, capacity: int, batch: int, heads: int, head: int, dtype, routing: dict[str, Any]) -> Cache:
    """Return an empty cache of `layers` layers. routing: from `empty_routing`."""
    shape = (batch, capacity, heads, head)
    return Cache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        mask=jnp.zeros((batch, capacity), bool),
        length=jnp.int32(0),
        routing=routing,
    )


def empty_routing(memory, layers: list[int], batch: int, width: int, dtype) -> dict[str, Any]:
    """Return the routers' initial state by memory layer; {} if the inference routing strategy keeps none."""
    strategy = memory.routing_strategy_inference
    if not memory.use_chapters or strategy not in ("rolling", "hybrid", "prefix"):
        return {}
    if strategy == "prefix":
        make = lambda: (jnp.zeros((batch, width)), jnp.zeros(batch))
    else:
        make = lambda: jnp.zeros((batch, memory.routing_window_size, width), dtype)
    return {str(layer): make() for layer in layers}


class View:
    """Positions, attention mask and cache of one call of a model. It is created anew in each call."""

    def __init__(
        self, token_mask, positions, segments, cache: Cache | None, batch: int, time: int, guard: bool = True,
        lengths=None,
    ):  # fmt: skip
        """Build the attention mask; token_mask, positions and segments are [batch, time] or None.

        token_mask: bool, False hides padding. segments: int, attention stays within equal numbers. guard: see `attend`.
        lengths: int [batch], given only if token_mask shows exactly the first lengths[i] tokens of row i.
        """
        self.cache = cache
        self.time = time
        self.guard = guard
        plain = cache is None and segments is None
        self.diagonal = plain and (token_mask is None or (lengths is not None and guard))
        self.lengths = None if token_mask is None else lengths
        self.token_mask = token_mask
        start = 0 if cache is None else cache.length
        self.positions = (start + jnp.arange(time))[None] if positions is None else positions
        keys = time if cache is None else cache.mask.shape[1]
        visible = jnp.arange(keys)[None, :] <= start + jnp.arange(time)[:, None]
        self.mask = visible[None, None]
        if cache is not None:
            present = jnp.ones((batch, time), bool) if token_mask is None else token_mask
            self.cached_mask = jax.lax.dynamic_update_slice(cache.mask, present, (0, start))
            self.mask = self.mask & self.cached_mask[:, None, None, :]
        elif token_mask is not None:
            self.mask = self.mask & token_mask[:, None, None, :]
        if segments is not None:
            self.mask = self.mask & (segments[:, None, :, None] == segments[:, None, None, :])
        self.starts, self.ends = (None, None) if segments is None else _bounds(segments)
        self.keys = {} if cache is None else dict(enumerate(cache.keys))
        self.values = {} if cache is None else dict(enumerate(cache.values))
        self.routing = {} if cache is None else dict(cache.routing)

    def attend(self, q, k, v, dropout_rate=0.0, rngs=None, window: int | None = None):
        """Return `jaxtrain.nn.attention` of this call's queries; window: number of most recent keys a query may see.

        A query that sees no key gives 0, or NaN with guard=False, as torch's softmax over an empty row does.
        """
        dropped = {"dropout_rate": dropout_rate, "rngs": rngs}
        if self.diagonal:
            return nn.attention(q, k, v, causal=True, lengths=self.lengths, window=window, **dropped)
        mask = self.mask if window is None else self.mask & self.near(window)
        if not self.guard:
            return nn.attention(q, k, v, mask=mask, **dropped)
        some = mask.any(-1, keepdims=True)  # [batch, 1, query, 1]
        y = nn.attention(q, k, v, mask=mask | ~some, **dropped)
        return jnp.where(some.swapaxes(1, 2), y, 0)

    def near(self, window: int):
        """Return bool [1, 1, time, key]: True for keys less than `window` tokens before the query."""
        start = 0 if self.cache is None else self.cache.length
        queries = start + jnp.arange(self.time)
        return (jnp.arange(self.mask.shape[-1])[None, :] > queries[:, None] - window)[None, None]

    def extend(self, layer: int, k, v):
        """Append this call's keys and values to the cache; return all keys and values (this call's without a cache)."""
        if self.cache is None:
            return k, v
        start = (0, self.cache.length, 0, 0)
        self.keys[layer] = jax.lax.dynamic_update_slice(self.keys[layer], k.astype(self.keys[layer].dtype), start)
        self.values[layer] = jax.lax.dynamic_update_slice(self.values[layer], v.astype(self.values[layer].dtype), start)
        return self.keys[layer], self.values[layer]

    def window(self, layer: int, hidden):
        """Append block inputs to a router's window.

        Returns the states [batch, window, width], oldest first, and bool [batch, window], True for real tokens.
        """
        states = self.routing[str(layer)]
        size = states.shape[1]
        states = jnp.concatenate([states, jax.lax.stop_gradient(hidden).astype(states.dtype)], axis=1)[:, -size:]
        self.routing[str(layer)] = states
        columns = self.cache.length + self.time - size + jnp.arange(size)
        mask = jnp.take(self.cached_mask, jnp.maximum(columns, 0), axis=1) & (columns >= 0)
        return states, mask

    def close(self) -> Cache | None:
        """Return the cache after this call, or None without one."""
        if self.cache is None:
            return None
        order = range(len(self.cache.keys))
        return Cache(
            tuple(self.keys[i] for i in order),
            tuple(self.values[i] for i in order),
            self.cached_mask,
            self.cache.length + self.time,
            self.routing,
        )


def _bounds(segments):
    """Return the first and the last position of each token's segment, int [batch, time] each."""
    last = segments.shape[1] - 1
    position = jnp.arange(last + 1)
    changed = segments[:, 1:] != segments[:, :-1]
    first_ones, last_ones = (jnp.pad(changed, ((0, 0), pad)) for pad in ((1, 0), (0, 1)))
    starts = jax.lax.cummax(jnp.where(first_ones, position, 0), axis=1)
    return starts, jax.lax.cummin(jnp.where(last_ones, position, last), axis=1, reverse=True)
