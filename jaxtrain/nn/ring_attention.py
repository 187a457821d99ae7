"""Causal attention of tokens that are spread over several devices (`shard.sequence`): no device ever holds all keys.

Keys and values are passed around the devices; a query's partial result is kept with the log of its softmax's sum.
Device i of n holds the consecutive parts 2i and 2i + 1 of 2n. Late tokens see more keys than early ones, so for the
computation the devices exchange parts: device i takes part i and its mirror 2n - 1 - i. Then every device computes two
blocks in each round.

Sources: Liu et al. 2023 (Ring Attention); Dao 2023 (FlashAttention-2), sec. 3.1, for the blocks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.nn import attention_blocks, fused_attention
from jaxtrain.runtime.spread import over_devices, parts

AXIS = "sequence"
TOKENS = ("batch", "sequence", "heads", None)


def is_needed(queries: int, keys: int, causal: bool) -> bool:
    """Return True if attention needs a ring: causal self-attention whose tokens are spread over several devices."""
    return parts("sequence") > 1 and causal and queries == keys


def attention(q, k, v, *, lengths=None, scale=None):
    """Compute `jaxtrain.nn.attention` with causal=True. q: [batch, token, head, width]; k, v: [batch, token, kv head,
    width]; lengths: int [batch], the number of visible keys of a sample. Raises UserError if the number of tokens is no
    multiple of twice the number of devices."""
    check_tokens(q.shape[1], parts("sequence"))
    fused = attention_blocks.takes(q, k, v, q.shape[1] // (2 * parts("sequence")))
    fused_attention.chosen[f"{'cuDNN' if fused else 'formula'}, in a ring"] += 1
    static = Static(parts("sequence"), q.shape[-1] ** -0.5 if scale is None else scale, fused)

    def run(place, q, k, v, *lengths):
        return _ring(static, q, k, v, lengths, place[0])

    given = () if lengths is None else (lengths.astype(jnp.int32),)
    places = jnp.arange(static.devices, dtype=jnp.int32)
    kinds = [("sequence",), TOKENS, TOKENS, TOKENS, ("batch",)][: 4 + len(given)]
    return over_devices(run, (places, q, k, v, *given), kinds, TOKENS)


def check_tokens(tokens: int, devices: int, key: str = "the batch's sequences") -> None:
    """Raise UserError if a sample's tokens cannot be divided into two equal parts per device."""
    if tokens % (2 * devices):
        fit = -(-tokens // (2 * devices)) * 2 * devices
        raise UserError(
            f"{key}: {tokens} is not a multiple of {2 * devices}, twice shard.sequence (each device takes two parts of "
            f"a sample); the next multiple is {fit}"
        )


class Static(NamedTuple):
    """Static options of a ring. fused: cuDNN's kernel computes the blocks."""

    devices: int
    scale: float
    fused: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: Static, q, k, v, lengths, place):
    """Compute the attention on each device. place: the device's number in the ring."""
    return _ring_forward(static, q, k, v, lengths, place)[0]


def _ring_forward(static, q, k, v, lengths, place):
    q, k, v = (_to_mirrored(x, place, static.devices) for x in (q, k, v))
    visible = functools.partial(_visible, static, lengths, q.shape[2])
    block = functools.partial(attention_blocks.forward, scale=static.scale, fused=static.fused)
    y, total = block(*map(_joined, (q, k, v)), visible(place, 0, 1), causal=True)
    found = _halves(y).astype(jnp.float32), _halves(total, axis=2)

    def step(carry, behind):
        (k, v), found = carry
        following = _pass_on((k, v), static.devices)
        source = (place - behind) % static.devices
        for mine, theirs in _pairs(source, place):
            part = block(q[mine], k[theirs], v[theirs], visible(source, theirs), causal=False)
            found = _merged(found, mine, part)
        return (following, found), None

    start = _pass_on((k, v), static.devices), found
    (_, (y, total)), _ = jax.lax.scan(step, start, jnp.arange(1, static.devices))
    y = y.astype(q.dtype)
    return _from_mirrored(y, place, static.devices), (q, k, v, y, total, lengths, place)


def _ring_backward(static, kept, grad):
    q, k, v, y, total, lengths, place = kept
    grad = _to_mirrored(grad, place, static.devices)
    visible = functools.partial(_visible, static, lengths, q.shape[2])
    block = functools.partial(attention_blocks.backward, scale=static.scale, fused=static.fused)
    whole: list[Any] = [*map(_joined, (q, k, v, y)), _joined(total, axis=2), _joined(grad), visible(place, 0, 1)]
    grad_q, *grad_keys = map(_halves, block(*whole, causal=True))

    def step(carry, behind):
        (k, v), (grad_k, grad_v), grad_q = carry  # the keys' gradients are passed around with the keys
        following = _pass_on((k, v), static.devices)
        source = (place - behind) % static.devices
        for mine, theirs in _pairs(source, place):
            own, of_k, of_v = block(
                q[mine], k[theirs], v[theirs], y[mine], total[mine], grad[mine], visible(source, theirs), causal=False
            )
            grad_q, grad_k = grad_q.at[mine].add(own), grad_k.at[theirs].add(of_k)
            grad_v = grad_v.at[theirs].add(of_v)
        return (following, _pass_on((grad_k, grad_v), static.devices), grad_q), None

    start = (*(_pass_on(x, static.devices) for x in ((k, v), tuple(grad_keys))), grad_q)
    (_, grad_keys, grad_q), _ = jax.lax.scan(step, start, jnp.arange(1, static.devices))
    grads = ((grad_q, q), (grad_keys[0], k), (grad_keys[1], v))
    return *(_from_mirrored(x.astype(like.dtype), place, static.devices) for x, like in grads), None, None


_ring.defvjp(_ring_forward, _ring_backward)


def _pairs(source, place):
    """Pair halves of this device's queries with the halves of `source`'s keys that they see.

    The mirrored half sees the first half of every device. If `source` is an earlier device, this device's first half
    sees the first half of `source` too; if it is a later one, the mirrored half sees the mirrored half of `source`.
    """
    both = jnp.where(source < place, 0, 1)
    return (1, 0), (both, both)


def _visible(static, lengths, size: int, source, *halves):
    """Return the number of visible keys in these halves of a device, int [batch]; None if all are visible."""
    if not lengths:
        return None
    starts = [jnp.where(half == 0, source, 2 * static.devices - 1 - source) * size for half in halves]
    return sum(jnp.clip(lengths[0] - start, 0, size) for start in starts)


def _merged(found, half, part):
    """Merge a block's result for half of the queries into their partial result. found: y float32 [half, batch, token,
    head, width], log of the sum [half, batch, head, token]."""
    (y, total), (more, its_total) = found, part
    joint = jnp.logaddexp(total[half], its_total)
    share = lambda log: jnp.swapaxes(jnp.where(joint == -jnp.inf, 0.0, jnp.exp(log - joint)), 1, 2)[..., None]
    y = y.at[half].set(y[half] * share(total[half]) + more.astype(jnp.float32) * share(its_total))
    return y, total.at[half].set(joint)


def _halves(x, axis: int = 1):
    return jnp.stack(jnp.split(x, 2, axis))


def _joined(x, axis: int = 1):
    return jnp.concatenate([x[0], x[1]], axis)


def _pass_on(arrays, devices: int):
    return jax.lax.ppermute(arrays, AXIS, [(i, (i + 1) % devices) for i in range(devices)])


def _to_mirrored(x, place, devices: int):
    """Exchange local tokens [batch, token, ...], parts 2i and 2i + 1, for part i and its mirror, [2, batch, token / 2,
    ...]."""
    even, odd = (jax.lax.ppermute(part, AXIS, _trades(which, devices)) for which, part in enumerate(_halves(x)))
    own = jnp.stack([even, odd])
    return jnp.where(place % 2 == 0, own, own[::-1])


def _from_mirrored(x, place, devices: int):
    """Undo `_to_mirrored`."""
    own = jnp.where(place % 2 == 0, x, x[::-1])
    back = lambda which: [(there, here) for here, there in _trades(which, devices)]
    return _joined(jnp.stack([jax.lax.ppermute(own[which], AXIS, back(which)) for which in (0, 1)]))


def _trades(which: int, devices: int) -> list[tuple[int, int]]:
    """Return (from, to) pairs of devices for the first (0) or second (1) part of each device."""
    numbers = [2 * i + which for i in range(devices)]
    return [(i, min(part, 2 * devices - 1 - part)) for i, part in enumerate(numbers)]
