"""One block of an attention whose keys are divided into blocks.

Forward: the block's result, and the log of its softmax's sum, by which blocks are combined. Backward: the block's share
of the gradients, given the result and the sum of all blocks. Source: Dao 2023 (FlashAttention-2), sec. 3.1. Only the
scores of a few queries are in memory at a time; with the GPU kernel, none.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.nn import cudnn, fused_attention

MOST_SCORES = 1 << 26  # scores in one array: 256 MiB of float32


def takes(q, k, v, tokens: int) -> bool:
    """Return True if cuDNN's kernel can compute blocks of so many tokens here."""
    return (
        tokens >= fused_attention.LEAST_TOKENS
        and fused_attention.takes(q, k, v, causal=True)
        and fused_attention.is_available()
        and (fused_attention.is_planned() or _runs_here())
    )


@functools.cache
def _runs_here() -> bool:
    return fused_attention.tried("cuDNN's kernel in blocks", difference)


def forward(q, k, v, lengths, *, causal: bool, scale: float, fused: bool):
    """Return y [batch, query, head, width] in v's dtype, and the log of the softmax's sum, float32 [batch, head,
    query].

    q: [batch, query, head, width]; k, v: [batch, key, kv head, width]. lengths: int [batch], visible keys, or None. A
    query that sees no key gives 0 and -inf."""
    if not fused:
        return _forward(q, k, v, lengths, causal, scale)
    some = None if lengths is None else jnp.maximum(lengths, 1)
    y, total = cudnn.forward(q, k, v, lengths=some, causal=causal, scale=scale)
    if lengths is None:
        return y, total
    sees = lengths > 0
    return jnp.where(sees[:, None, None, None], y, 0), jnp.where(sees[:, None, None], total, -jnp.inf)


def backward(q, k, v, y, total, grad, lengths, *, causal: bool, scale: float, fused: bool):
    """Return the gradients of q, k and v in float32. y, total: of all blocks together. grad: the gradient of y."""
    if not fused:
        return _backward(q, k, v, y, total, grad, lengths, causal, scale)
    some = None if lengths is None else jnp.maximum(lengths, 1)
    total = jnp.where(total == -jnp.inf, 0.0, total)
    grads = cudnn.backward(q, k, v, y, total, grad.astype(q.dtype), lengths=some, causal=causal, scale=scale)
    sees = True if lengths is None else (lengths > 0)[:, None, None, None]
    return tuple(jnp.where(sees, each.astype(jnp.float32), 0.0) for each in grads)


def _forward(q, k, v, lengths, causal, scale):
    def piece(_, part):
        queries, places = part
        scores = jnp.where(
            _sees(places, k, lengths, causal), _product("bqngd,bknd->bngqk", queries, k) * scale, -jnp.inf
        )
        largest = scores.max(-1, keepdims=True)
        p = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest))
        norm = p.sum(-1, keepdims=True)
        p = (p / jnp.where(norm == 0, 1.0, norm)).astype(v.dtype)
        total = largest[..., 0] + jnp.log(norm[..., 0])
        return None, (_product("bngqk,bknd->bqngd", p, v).astype(v.dtype), total)

    _, (y, total) = jax.lax.scan(piece, None, _in_pieces((q,), k))
    return _whole(y, q.shape), _whole_sum(total)


def _backward(q, k, v, y, total, grad, lengths, causal, scale):
    delta = (grad.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1, keepdims=True)
    total = jnp.swapaxes(total, 1, 2)[..., None]

    def piece(carry, part):
        of_k, of_v = carry
        queries, total, grad, delta, places = part
        by_key = lambda x: jnp.moveaxis(x, 1, 3)  # [batch, query, kv, group, 1] -> [batch, kv, group, query, 1]
        scores = _product("bqngd,bknd->bngqk", queries, k) * scale
        p = jnp.where(_sees(places, k, lengths, causal), jnp.exp(scores - by_key(total)), 0.0)
        by_scores = p * (_product("bqngd,bknd->bngqk", grad, v) - by_key(delta)) * scale
        p, by_scores = p.astype(v.dtype), by_scores.astype(q.dtype)
        of_k = of_k + _product("bngqk,bqngd->bknd", by_scores, queries)
        of_v = of_v + _product("bngqk,bqngd->bknd", p, grad)
        return (of_k, of_v), _product("bngqk,bknd->bqngd", by_scores, k)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    (of_k, of_v), of_q = jax.lax.scan(piece, zeros, _in_pieces((q, total, grad.astype(v.dtype), delta), k))
    return _whole(of_q, q.shape), of_k, of_v


def _product(equation: str, left, right):
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _sees(places, k, lengths, causal: bool):
    """Return which keys a query sees, bool, broadcastable to [batch, kv, group, query, key]. places: the queries'
    positions, int [query]."""
    keys = jnp.arange(k.shape[1])
    found = (keys <= places[:, None] if causal else jnp.ones((1, len(keys)), bool))[None, None, None]
    return found if lengths is None else found & (keys < lengths[:, None])[:, None, None, None]


def _in_pieces(arrays, k):
    """Reshape [batch, query, head, ...] to [piece, batch, query / piece, kv, group, ...]; return also the queries'
    positions."""
    batch, queries, heads = arrays[0].shape[:3]
    wanted = max(1, batch * heads * queries * k.shape[1] // MOST_SCORES)
    count = next(n for n in range(min(wanted, queries), queries + 1) if queries % n == 0)
    cut = lambda x: jnp.moveaxis(x.reshape(batch, count, -1, k.shape[2], heads // k.shape[2], x.shape[-1]), 1, 0)
    return *map(cut, arrays), jnp.arange(queries).reshape(count, -1)


def _whole(x, shape):
    return jnp.moveaxis(x, 0, 1).reshape(shape)


def _whole_sum(x):
    """Reshape [piece, batch, kv, group, query / piece] to [batch, head, query]."""
    pieces, batch, kv, group, size = x.shape
    return jnp.moveaxis(x, 0, 3).reshape(batch, kv * group, pieces * size)


def difference(fused: bool = True) -> float:
    """Return the largest relative error (L2 norm) of blocks in bfloat16 against the formula in float32."""
    q, k, v, grad = (jax.random.normal(jax.random.key(i), (2, 64, n, 64)) for i, n in enumerate((4, 2, 2, 4)))
    worst = 0.0
    for causal, lengths in ((True, None), (False, None), (False, jnp.asarray([40, 64], jnp.int32))):
        options = {"causal": causal, "scale": 0.125}
        y, total = forward(q, k, v, lengths, **options, fused=False)
        later = total + 0.5  # as if other blocks had been seen
        wanted = y, total, *backward(q, k, v, y, later, grad, lengths, **options, fused=False)
        q_, k_, v_, y_, grad_ = (x.astype(jnp.bfloat16) for x in (q, k, v, y, grad))
        got = forward(q_, k_, v_, lengths, **options, fused=fused)
        got += backward(q_, k_, v_, y_, later, grad_, lengths, **options, fused=fused)
        for mine, its in zip(got, wanted, strict=True):
            off = jnp.linalg.norm((mine.astype(jnp.float32) - its).ravel()) / jnp.linalg.norm(its.ravel())
            worst = max(worst, float(off))
    return worst
