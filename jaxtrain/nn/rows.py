"""Look up rows of a table, tokens of a sample and one value of each row, with gradients that a GPU sums in fixed order.

The gradient of a look-up sums rows that share an index. XLA's scatter adds them in an arbitrary order of threads; if
operations must be deterministic, it sorts every element of the gradient instead of its rows. Here the sum on a GPU is
written out: for few rows as a product with zeros and ones; for many by sorting the indices, summing runs of equal ones,
and writing each sum once. On a CPU, whose scatter is one sequential loop, jax's own is used.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxtrain.runtime import spread

PRODUCT_LIMIT = 4e10  # largest FLOPs (twice the multiply-adds) of a product with zeros and ones: 0.05 ms on an H200


def rows(table, indices, mode: str | None = None):
    """Look up the rows of a table [row, ...] at int [...]: [..., ...], as jnp.take(axis=0, mode=mode) does."""
    return _rows(table, indices, mode, table.shape, jnp.dtype(table.dtype).name, spread.current())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _rows(table, indices, mode, shape, dtype, over):
    return jnp.take(table, indices, axis=0, mode=mode)


def _rows_backward(mode, shape, dtype, over, indices, grad):
    like = jax.ShapeDtypeStruct(shape, dtype)

    def scattered(indices, grad):
        return jax.linear_transpose(lambda table: jnp.take(table, indices, axis=0, mode=mode), like)(grad)[0]

    def in_order(indices, grad):
        with spread.resumed(over):
            return row_sums(jnp.clip(indices, 0, shape[0] - 1) if mode == "clip" else indices, grad, like)

    if not jnp.issubdtype(like.dtype, jnp.floating):
        return scattered(indices, grad), None
    return jax.lax.platform_dependent(indices, grad, cpu=scattered, default=in_order), None


_rows.defvjp(lambda table, indices, *static: (_rows(table, indices, *static), indices), _rows_backward)


def row_sums(indices, values, like):
    """Sum values [..., ...] by indices int [...] into an array like `like` [row, ...], in float32 and in a fixed order.
    Indices outside the table are ignored."""
    count, (outer, *inner) = indices.size, like.shape
    indices = jnp.where(indices < 0, indices + outer, indices)  # as in jnp.take
    width = math.prod(inner)
    lead = indices.shape[:2] if indices.ndim > 1 else (count, 1)
    by_row, by_token = _cuts(*lead)
    pieces = by_row * by_token
    if pieces > 1:  # each device sums its own rows, then the sums are added: else the partitioner gathers the batch
        indices = spread.apart(indices.reshape(*lead, -1), by_row, by_token).reshape(pieces, -1)
        values = spread.apart(values.reshape(*lead, -1, width), by_row, by_token).reshape(pieces, -1, width)
    else:
        indices, values = indices.reshape(1, count), values.reshape(1, count, width)
    if 2.0 * outer * count / pieces * values.shape[-1] <= PRODUCT_LIMIT:
        hot = (indices[..., None] == jnp.arange(outer)).astype(values.dtype)
        sums = _product("pnr,pnd->prd", hot, values, like.dtype)
    else:
        sums = jax.vmap(functools.partial(_sorted_sums, rows=outer, dtype=like.dtype))(indices, values)
    return (sums[0] if pieces == 1 else _over_pieces(spread.in_parts(sums))).reshape(outer, *inner)


def _over_pieces(sums):
    """Sum [piece, ...] over the pieces in its own dtype, like other gradients. jnp.sum would send float32, and XLA adds
    the look-ups of several layers before it sends them only if there is no cast in between."""
    return jax.lax.reduce(sums, jnp.zeros((), sums.dtype), jax.lax.add, (0,))


def _cuts(samples: int, tokens: int) -> tuple[int, int]:
    """Return the numbers of pieces of samples and of their tokens: as on the devices, or (1, 1) if not divisible."""
    by_row, by_token = spread.parts(), spread.parts("sequence")
    return (by_row, by_token) if samples % by_row == 0 and tokens % by_token == 0 else (1, 1)


def _sorted_sums(indices, values, rows: int, dtype):
    """Sum values [n, width] by indices [n] to [rows, width]: a segmented scan over the sorted rows, whose last row of
    each run is the sum."""
    order = jnp.argsort(indices)
    indices, values = indices[order], values[order].astype(jnp.promote_types(values.dtype, jnp.float32))
    edge = indices[1:] != indices[:-1]
    one = jnp.ones(1, bool)

    def join(left, right):
        (begun, total), (begins, value) = left, right
        return begun | begins, jnp.where(begins[:, None], value, total + value)

    _, sums = jax.lax.associative_scan(join, (jnp.concatenate([one, edge]), values))
    elsewhere = rows + jnp.arange(len(indices), dtype=indices.dtype)  # distinct and out of range: dropped
    place = jnp.where(jnp.concatenate([edge, one]) & (indices >= 0) & (indices < rows), indices, elsewhere)
    empty = jnp.zeros((rows, values.shape[1]), dtype)
    return empty.at[place].set(sums.astype(dtype), mode="drop", unique_indices=True)


def tokens(x, indices):
    """Look up tokens of x [batch, token, width] at int [batch, n]: [batch, n, width]."""
    return _tokens(x, indices, x.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _tokens(x, indices, count):
    return jnp.take_along_axis(x, indices[..., None], axis=1)


def _tokens_backward(count, indices, grad):
    like = jax.ShapeDtypeStruct((grad.shape[0], count, grad.shape[2]), grad.dtype)

    def scattered(indices, grad):
        look_up = lambda x: jnp.take_along_axis(x, indices[..., None], axis=1)
        return jax.linear_transpose(look_up, like)(grad)[0]

    def product(indices, grad):
        hot = (indices[..., None] == jnp.arange(count)).astype(grad.dtype)
        return _product("bnt,bnd->btd", hot, grad, grad.dtype)

    return jax.lax.platform_dependent(indices, grad, cpu=scattered, default=product), None


_tokens.defvjp(lambda x, indices, count: (_tokens(x, indices, count), indices), _tokens_backward)


def columns(x, indices):
    """Look up x [batch, head, row, n] at int [row, k], the same for all samples and heads: [batch, head, row, k]."""
    return _columns(x, indices, x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _columns(x, indices, count):
    return jnp.take_along_axis(x, indices[None, None], axis=-1)


def _columns_backward(count, indices, grad):
    like = jax.ShapeDtypeStruct((*grad.shape[:-1], count), grad.dtype)

    def scattered(indices, grad):
        look_up = lambda x: jnp.take_along_axis(x, indices[None, None], axis=-1)
        return jax.linear_transpose(look_up, like)(grad)[0]

    def product(indices, grad):
        hot = (indices[..., None] == jnp.arange(count)).astype(grad.dtype)
        return _product("rkn,bhrk->bhrn", hot, grad, grad.dtype)

    return jax.lax.platform_dependent(indices, grad, cpu=scattered, default=product), None


_columns.defvjp(lambda x, indices, count: (_columns(x, indices, count), indices), _columns_backward)


@jax.custom_vjp
def permuted(x, order, back):
    """Permute each sample's tokens of x [batch, token, width] by `order`, int [batch, token]. back: the inverse order,
    which the gradient uses."""
    return jnp.take_along_axis(x, order[..., None], axis=1)


permuted.defvjp(
    lambda x, order, back: (permuted(x, order, back), (order, back)),
    lambda kept, grad: (permuted(grad, kept[1], kept[0]), None, None),
)


def _product(equation: str, hot, values, dtype):
    """Multiply by an array of zeros and ones, exactly but for the order of sums: float32 values are not cut to TF32."""
    wide = jnp.promote_types(values.dtype, jnp.float32)
    exact = jax.lax.Precision.HIGHEST if values.dtype == wide else None
    total = jnp.einsum(equation, hot, values, precision=exact, preferred_element_type=wide)
    return total.astype(dtype)


def pick(values, index):
    """Pick one value of each row: [..., n] at int [...] -> [...]. An index outside the row picks 0.

    It compares indices, which fuses with the computation of the values; so does its gradient.
    """
    return jnp.where(jnp.arange(values.shape[-1]) == index[..., None], values, 0).sum(-1)
