"""Attention as three Triton kernels, with or without dropout, so that neither scores nor masks go to GPU memory.

The dropout mask is that of `jaxtrain.nn.dropout`, computed in the kernel from key and position. So it drops the same
elements as the formula, on any number of devices and after a resume. (cuDNN's own dropout counts the calls of a process
and starts from 0 after a resume.)
Source: Dao 2023 (FlashAttention-2).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtrain.nn.dropout import of_columns, of_rows, threshold, words
from jaxtrain.runtime.spread import over_devices

LOG2_E = 1.4426950408889634  # exponentials are computed as powers of two, for which a GPU has an instruction
LEAST = -1e30  # score of a hidden key: finite, so that a row of them gives no NaN
BLOCK = 64  # queries and keys per step of the backward kernels, and keys per step of the forward kernel
WIDTHS = (16, 32, 64, 128)


class Sizes(NamedTuple):
    """The kernels' static options. queries, heads: of the whole array, before padding and splitting over devices."""

    scale: float
    causal: bool
    drops: bool
    queries: int
    heads: int
    interpret: bool


def takes(q) -> bool:
    """Return True if the kernels support the head width."""
    return q.shape[-1] in WIDTHS


def attention(q, k, v, key=None, kept=1.0, *, mask=None, lengths=None, causal=False, scale=None, interpret=False):
    """Compute dropout(softmax(q k^T scale)) v. q: [batch, query, head, width]; k, v: [batch, key, kv head, width]; key:
    random key, None for no dropout; kept: probability to keep a weight; mask: bool [batch or 1, head or 1, query or 1,
    key or 1], True = may attend; lengths: int [batch], number of visible keys. A query that may attend to nothing gives
    0. interpret: run the kernels as plain JAX, on any device."""
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    if kv_heads != heads:
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    sizes = Sizes(width**-0.5 if scale is None else scale, causal, key is not None, queries, heads, interpret)
    numbers = [jnp.uint32(0)] * 3 if key is None else [*words(key), threshold(kept)]
    seed = jnp.stack([*numbers, jnp.uint32(0)])  # a Triton block's size is a power of two
    share = jnp.asarray(kept, jnp.float32).reshape(1)
    lengths = jnp.full(batch, keys, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    q, k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, 0))) for x in (q, k, v))
    numbers = [jnp.arange(batch, dtype=jnp.uint32), jnp.arange(heads, dtype=jnp.uint32), lengths]
    whole, tokens = (None,), ("batch", None, "heads", None)
    kinds = [tokens, tokens, tokens, whole, whole, ("batch",), ("heads",), ("batch",)]
    if mask is not None:
        numbers.append(_padded(mask, queries, keys))
        kinds.append(("batch", "heads", None, None))
    run = functools.partial(_attend, sizes)
    return over_devices(run, (q, k, v, seed, share, *numbers), kinds, tokens)[:, :queries]


def _padded(mask, queries: int, keys: int):
    """Return the mask as int8 with whole blocks of keys, and of queries if it has several; the added ones are hidden.
    Axes of length 1 stay so: a mask of keys is read once per block of keys."""
    mask = jnp.broadcast_to(mask, (*mask.shape[:3], keys)).astype(jnp.int8)
    added = -queries % BLOCK if mask.shape[2] > 1 else 0
    return jnp.pad(mask, ((0, 0), (0, 0), (0, added), (0, -keys % BLOCK)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes, q, k, v, *numbers):
    return _run_forward(sizes, q, k, v, *numbers)[0]


def _forward(sizes, q, k, v, *numbers):
    y, log_sums = _run_forward(sizes, q, k, v, *numbers)
    return y, (q, k, v, numbers, y, log_sums)


def _backward(sizes, residuals, grad):
    q, k, v, numbers, y, log_sums = residuals
    inner = jnp.sum(grad.astype(jnp.float32) * y.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [batch, head, query]
    mask = _mask_of(numbers)
    operands = (*numbers[:5], mask, q, k, v, grad.astype(q.dtype), log_sums, inner)
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    row, one, all_q, all_k = _specs(BLOCK, queries, keys, width)
    per_query = pl.BlockSpec((None, None, BLOCK), lambda i, j, h: (j, h, i))
    all_queries = pl.BlockSpec((None, None, queries), lambda i, j, h: (j, h, 0))
    call = functools.partial(
        pl.pallas_call,
        compiler_params=_params(width),
        cost_estimate=_cost(q, k),
        interpret=sizes.interpret,
        name="dropped_attention_backward",
    )
    of_q = call(
        functools.partial(_query_gradient, sizes),
        grid=(queries // BLOCK, batch, heads),
        in_specs=[*one, _mask_spec(mask, BLOCK, None), row, all_k, all_k, row, per_query, per_query],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(*operands)
    of_k, of_v = call(
        functools.partial(_key_gradients, sizes),
        grid=(keys // BLOCK, batch, heads),
        in_specs=[*one, _mask_spec(mask, None, BLOCK), all_q, row, row, all_q, all_queries, all_queries],
        out_specs=[row, row],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
    )(*operands)
    return of_q, of_k, of_v, *(None for _ in numbers)


_attend.defvjp(_forward, _backward)


def _run_forward(sizes, q, k, v, *numbers):
    batch, queries, heads, width = q.shape
    block = 2 * BLOCK if queries % (2 * BLOCK) == 0 else BLOCK
    row, one, _, all_k = _specs(block, queries, k.shape[1], width)
    mask = _mask_of(numbers)
    return pl.pallas_call(
        functools.partial(_outputs, sizes),
        grid=(queries // block, batch, heads),
        in_specs=[*one, _mask_spec(mask, block, None), row, all_k, all_k],
        out_specs=[row, pl.BlockSpec((None, None, block), lambda i, j, h: (j, h, i))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        ],
        compiler_params=_params(width),
        cost_estimate=_cost(q, k),
        interpret=sizes.interpret,
        name="dropped_attention_forward",
    )(*numbers[:5], mask, q, k, v)


def _specs(block: int, queries: int, keys: int, width: int):
    """Return the block specs of one program (block, sample, head): its tokens; seed, share, sample, head, length; all
    queries; all keys."""
    row = pl.BlockSpec((None, block, None, width), lambda i, j, h: (j, i, h, 0))
    whole = lambda size: pl.BlockSpec((None, size, None, width), lambda i, j, h: (j, 0, h, 0))
    of_sample, of_head = pl.BlockSpec((1,), lambda i, j, h: (j,)), pl.BlockSpec((1,), lambda i, j, h: (h,))
    seed = pl.BlockSpec((4,), lambda i, j, h: (0,)), pl.BlockSpec((1,), lambda i, j, h: (0,))
    return row, (*seed, of_sample, of_head, of_sample), whole(queries), whole(keys)


def _mask_of(numbers):
    """Return the mask behind seed, share, samples, heads and lengths; None if there is none."""
    return numbers[5] if len(numbers) > 5 else None


def _mask_spec(mask, query_block: int | None, key_block: int | None):
    """Return the spec of a program's part of the mask: its block of queries and all keys, or all queries and its block
    of keys."""
    if mask is None:
        return None
    per_sample, per_head, per_query = (size > 1 for size in mask.shape[:3])
    rows = (query_block or mask.shape[2]) if per_query else None
    by_query, by_key = query_block is not None and per_query, key_block is not None

    def index(i, j, h):
        return j if per_sample else 0, h if per_head else 0, i if by_query else 0, i if by_key else 0

    return pl.BlockSpec((None, None, rows, key_block or mask.shape[3]), index)


def _visible(mask_ref, queries: slice | pl.Slice = slice(None), keys: slice | pl.Slice = slice(None)):
    """Return a block of the mask, bool [query or 1, key]; None without a mask."""
    if mask_ref is None:
        return None
    return (mask_ref[keys][None, :] if len(mask_ref.shape) == 1 else mask_ref[queries, keys]) != 0


def _params(width: int):
    return triton.CompilerParams(num_warps=4 if width <= 64 else 8, num_stages=2)


def _cost(q, k) -> pl.CostEstimate:
    """Estimate a kernel's cost as two products, the model's FLOPs; recomputed scores are not counted."""
    scores = q.size // q.shape[-1] * k.shape[1]
    return pl.CostEstimate(flops=4 * scores * q.shape[-1], transcendentals=scores, bytes_accessed=8 * q.size)


def _outputs(sizes, seed, share, sample, head, length, mask_ref, q_ref, k_ref, v_ref, y_ref, log_sums_ref):
    block, (keys, width) = q_ref.shape[0], k_ref.shape
    start = pl.program_id(0) * block
    q, seen = q_ref[...], length[0]

    def step(turn, carry):
        y, largest, total = carry
        cut = pl.dslice(turn * BLOCK, BLOCK)
        scores = _scores(sizes, q, k_ref[cut, :], start, turn * BLOCK, seen, _visible(mask_ref, keys=cut))
        grown = jnp.maximum(largest, scores.max(axis=1))
        p, decay = jnp.exp2(scores - grown[:, None]), jnp.exp2(largest - grown)
        left = _dropped(sizes, p, seed, sample, head, start, turn * BLOCK)
        v = v_ref[cut, :]
        y = y * decay[:, None] + triton.dot(left.astype(v.dtype), v)
        return y, grown, total * decay + p.sum(axis=1)

    begin = (
        jnp.zeros((block, width), jnp.float32),
        jnp.full(block, LEAST, jnp.float32),
        jnp.zeros(block, jnp.float32),
    )
    y, largest, total = lax.fori_loop(0, _end(sizes, start + block, seen, keys), step, begin)
    blind = largest <= LEAST  # no key is visible: the result is 0, and so are all weights in the backward kernels
    total = jnp.where(blind, 1.0, total)
    y_ref[...] = jnp.where(blind[:, None], 0.0, y / (total * share[0])[:, None]).astype(y_ref.dtype)
    log_sums_ref[...] = jnp.where(blind, -LEAST, largest + jnp.log2(total))


def _query_gradient(
    sizes, seed, share, sample, head, length, mask_ref, q_ref, k_ref, v_ref, grad_ref, sums_ref, inner_ref, out
):
    start = pl.program_id(0) * BLOCK
    q, grad, log_sums, inner, seen = q_ref[...], grad_ref[...], sums_ref[...], inner_ref[...], length[0]

    def step(turn, total):
        cut = pl.dslice(turn * BLOCK, BLOCK)
        k, v = k_ref[cut, :], v_ref[cut, :]
        scores = _scores(sizes, q, k, start, turn * BLOCK, seen, _visible(mask_ref, keys=cut))
        p = jnp.exp2(scores - log_sums[:, None])
        slope = triton.dot(grad, v.T) / share[0]
        upstream = _dropped(sizes, slope, seed, sample, head, start, turn * BLOCK) - inner[:, None]
        return total + triton.dot((p * upstream * sizes.scale).astype(k.dtype), k)

    end = _end(sizes, start + BLOCK, seen, k_ref.shape[0])
    total = lax.fori_loop(0, end, step, jnp.zeros(q.shape, jnp.float32))
    out[...] = total.astype(out.dtype)


def _key_gradients(
    sizes, seed, share, sample, head, length, mask_ref, q_ref, k_ref, v_ref, grad_ref, sums_ref, inner_ref, of_k, of_v
):
    start = pl.program_id(0) * BLOCK
    k, v, seen, queries = k_ref[...], v_ref[...], length[0], q_ref.shape[0]

    def step(turn, carry):
        total_k, total_v = carry
        cut = pl.dslice(turn * BLOCK, BLOCK)
        q, grad, log_sums, inner = q_ref[cut, :], grad_ref[cut, :], sums_ref[cut], inner_ref[cut]
        scores = _scores(sizes, q, k, turn * BLOCK, start, seen, _visible(mask_ref, queries=cut))
        p = jnp.exp2(scores - log_sums[:, None])
        drop = functools.partial(_dropped, sizes, seed=seed, sample=sample, head=head)
        drop = functools.partial(drop, first_query=turn * BLOCK, first_key=start)
        total_v += triton.dot(drop(p / share[0]).astype(grad.dtype).T, grad)
        upstream = drop(triton.dot(grad, v.T) / share[0]) - inner[:, None]
        total_k += triton.dot((p * upstream * sizes.scale).astype(q.dtype).T, q)
        return total_k, total_v

    first = lax.div(start, BLOCK) if sizes.causal else jnp.int32(0)
    seen_at_all = (start < seen).astype(jnp.int32)
    last = first + seen_at_all * (queries // BLOCK - first)  # keys that no query sees have no gradient
    zeros = jnp.zeros(k.shape, jnp.float32)
    total_k, total_v = lax.fori_loop(first, last, step, (zeros, zeros))
    of_k[...], of_v[...] = total_k.astype(of_k.dtype), total_v.astype(of_v.dtype)


def _scores(sizes, q, k, first_query, first_key, seen, mask):
    """Return the scores of a pair of blocks as exponents of two, float32 [query, key]; LEAST for hidden keys. mask:
    bool [query or 1, key] or None."""
    scores = triton.dot(q, k.T) * np.float32(sizes.scale * LOG2_E)
    shape = scores.shape
    columns = first_key + lax.broadcasted_iota(jnp.int32, shape, 1)
    visible = columns < seen
    if mask is not None:
        visible &= mask
    if sizes.causal:
        visible &= columns <= first_query + lax.broadcasted_iota(jnp.int32, shape, 0)
    return jnp.where(visible, scores, np.float32(LEAST))


def _dropped(sizes, x, seed, sample, head, first_query, first_key):
    """Return x [query, key] with 0 where `jaxtrain.nn.dropout` drops elements of [batch, head, query, key]."""
    if not sizes.drops:
        return x
    outer = (sample[0] * np.uint32(sizes.heads) + head[0]) * np.uint32(sizes.queries)
    rows = outer + jnp.uint32(first_query) + jnp.arange(x.shape[0], dtype=jnp.uint32)
    columns = jnp.uint32(first_key) + lax.broadcasted_iota(jnp.uint32, x.shape, 1)
    start, stride = of_rows(rows, seed[0], seed[1])
    return jnp.where(of_columns(columns, start[:, None], stride[:, None]) < seed[2], x, 0.0)


def _end(sizes, last_query, seen, keys: int):
    """Return the number of key blocks that may be visible; all later ones are hidden."""
    end = lax.div(seen + (BLOCK - 1), BLOCK)
    return jnp.minimum(end, lax.div(last_query + (BLOCK - 1), BLOCK)) if sizes.causal else end
