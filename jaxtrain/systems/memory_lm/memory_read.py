"""Read the memory: choose chapters by the routing strategy, and compute the update of the residual stream."""

import jax.numpy as jnp

from jaxtrain.systems.memory_lm.banks import ChapteredMemoryBank
from jaxtrain.systems.memory_lm.router import document_mean, masked_mean, prefix_mean

PER_TOKEN = ("token", "prefix")


def choose_chapters(router, memory, hidden, view, layer: int, strategy: str, prefill: bool):
    """Return the Routing of one memory layer.

    hidden: [batch, time, width], the router's input. With a cache, the strategies rolling and hybrid pool a window of
    block inputs (hybrid: the whole prompt if `prefill`); without a cache they act as `sequence`. In packed rows every
    document is pooled separately.
    """
    mask = view.token_mask if memory.mask_aware_pooling else None
    if strategy == "prefix":
        state = view.routing.get(str(layer), (None, None))
        means, total, count = prefix_mean(hidden, view.token_mask, *state, view.starts)
        if view.cache is not None:
            view.routing[str(layer)] = (total, count)
        return router.route_tokens(means)
    if view.starts is not None and strategy != "token":
        window = memory.routing_window_size if strategy == "sequence-rolling" else 1
        return router.route_tokens(document_mean(hidden, window, view.starts, view.ends))
    if strategy in ("rolling", "hybrid"):
        if view.cache is None:
            return router(hidden, "sequence", mask)
        states, real = view.window(layer, hidden)
        if strategy == "hybrid" and prefill:
            return router.route(masked_mean(hidden, view.token_mask))
        return router.route(masked_mean(states, real).astype(hidden.dtype))
    return router(hidden, strategy, mask)


def read_memory(attention, bank, memory, x, routing=None, strategy: str = "token", rngs=None):
    """Return the memory's contribution to the residual stream, [batch, time, width].

    x: the normalised stream. routing: the chosen chapters, None to read the whole bank. strategy: the routing strategy;
    it distinguishes a choice per token from one that all tokens of a packed document share.
    """
    if routing is None:
        return attention(x, bank.get_memory(), rngs)
    q = attention.heads("q", x)
    if strategy in PER_TOKEN:
        y = _read_per_token(attention, bank, memory, q, routing, rngs)
    elif routing.indices.ndim == 3:
        y = _read_per_document(attention, bank, memory, q, routing, rngs)
    else:
        y = _read_per_sequence(attention, bank, memory, q, routing, rngs)
    return attention.merge(y.astype(q.dtype))


def _read_per_token(attention, bank: ChapteredMemoryBank, memory, q, routing, rngs):
    """Return the dense read of the shared chapters plus `routed_scaling_factor` times each token's routed chapters."""
    shared, count = memory.num_shared_chapters, routing.indices.shape[-1]
    norm = _branch_norm(memory, shared and count)
    parts = []
    chapters = norm(bank.base_bank.expand(bank.chapters()))
    if shared:
        dense = chapters[:shared].reshape(-1, chapters.shape[-1])
        parts.append(attention.attend(q, dense, rngs).astype(jnp.float32))
    if count:
        indices = routing.indices - shared
        routed = attention.attend_routed(q, chapters[shared:], indices, routing.weights, rngs)
        parts.append(memory.routed_scaling_factor * routed)
    return sum(parts)


def _read_per_sequence(attention, bank: ChapteredMemoryBank, memory, q, routing, rngs):
    """Read the chapters chosen for each sequence.

    By default one joint softmax over their tokens, which are multiplied by the chapter's weight (so it scales keys and
    values); with `chapter_softmax: independent` a softmax within each chapter.
    """
    indices, weights = _with_shared(memory, routing)
    norm = _branch_norm(memory, memory.num_shared_chapters and routing.indices.shape[-1])
    selected = norm(bank.select(indices))  # [batch, chapter, token, width]
    if memory.chapter_softmax == "independent":
        return attention.attend_chapters(q, selected, weights, rngs)
    selected = selected * weights[..., None, None].astype(selected.dtype)
    return attention.attend(q, selected.reshape(selected.shape[0], -1, selected.shape[-1]), rngs)


def _read_per_document(attention, bank: ChapteredMemoryBank, memory, q, routing, rngs):
    """Do `_read_per_sequence` for packed rows; the choice is repeated at each token of a document."""
    norm = _branch_norm(memory, memory.num_shared_chapters and routing.indices.shape[-1])
    chapters = norm(bank.base_bank.expand(bank.chapters()))
    attend = attention.attend_routed if memory.chapter_softmax == "independent" else attention.attend_jointly
    return attend(q, chapters, *_with_shared(memory, routing), rngs)


def _with_shared(memory, routing):
    """Return indices and weights [..., shared + k] with the shared chapters first; the weights sum to 1."""
    indices, weights, shared = routing.indices, routing.weights, memory.num_shared_chapters
    if not shared:
        return indices, weights
    lead = (*indices.shape[:-1], shared)
    first = jnp.broadcast_to(jnp.arange(shared, dtype=indices.dtype), lead)
    weights = jnp.concatenate([jnp.ones(lead), memory.routed_scaling_factor * weights], axis=-1)
    return jnp.concatenate([first, indices], axis=-1), weights / weights.sum(-1, keepdims=True)


def _branch_norm(memory, both_parts):
    """Return a function that normalises each memory vector, without learned weights.

    It is the identity unless the setting is on and both shared and routed chapters exist.
    """
    if not (memory.normalize_shared_routed_before_mixing and both_parts):
        return lambda x: x
    eps = memory.shared_routed_norm_eps

    def norm(x):
        y = x.astype(jnp.float32)
        if memory.shared_routed_norm_type == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        return (y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + eps)).astype(x.dtype)

    return norm
