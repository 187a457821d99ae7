"""Operators that make tensors from numbers."""

import jax.numpy as jnp
import numpy as np

from torch_bridge.lowering.dtypes import cast, is_float, jax_dtype, within
from torch_bridge.lowering.table import lowering

FLOAT = jnp.float32


def _filled(shape, value, dtype):
    if hasattr(value, "dtype"):
        return jnp.broadcast_to(cast(value, dtype or value.dtype), tuple(shape))
    if dtype is None:
        dtype = jnp.bool_ if isinstance(value, bool) else jnp.int32 if isinstance(value, int) else FLOAT
    return jnp.full(tuple(shape), within(value, jnp.dtype(dtype)), dtype)


@lowering("full.default")
def full(call, size, fill_value, *, dtype=None, **placement):
    return _filled(size, fill_value, dtype and jax_dtype(dtype))


@lowering("zeros.default", "empty.memory_format", "empty_permuted.default", "empty_strided.default")
def zeros(call, size, *layout, dtype=None, **placement):
    """Return zeros, also where torch leaves memory undefined."""
    return jnp.zeros(tuple(size), FLOAT if dtype is None else jax_dtype(dtype))


@lowering("ones.default")
def ones(call, size, *, dtype=None, **placement):
    return jnp.ones(tuple(size), FLOAT if dtype is None else jax_dtype(dtype))


@lowering("full_like.default")
def full_like(call, x, fill_value, *, dtype=None, **placement):
    return _filled(x.shape, fill_value, x.dtype if dtype is None else jax_dtype(dtype))


@lowering("zeros_like.default", "empty_like.default")
def zeros_like(call, x, *, dtype=None, **placement):
    return jnp.zeros(x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@lowering("ones_like.default")
def ones_like(call, x, *, dtype=None, **placement):
    return jnp.ones(x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@lowering("new_full.default")
def new_full(call, x, size, fill_value, *, dtype=None, **placement):
    return _filled(size, fill_value, x.dtype if dtype is None else jax_dtype(dtype))


@lowering("new_zeros.default", "new_empty.default", "new_empty_strided.default")
def new_zeros(call, x, size, *layout, dtype=None, **placement):
    return jnp.zeros(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@lowering("new_ones.default")
def new_ones(call, x, size, *, dtype=None, **placement):
    return jnp.ones(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@lowering("fill.Scalar", "fill.Tensor")
def fill(call, x, value):
    return _filled(x.shape, value, x.dtype)


@lowering("scalar_tensor.default")
def scalar_tensor(call, value, *, dtype=None, **placement):
    return _filled((), value, FLOAT if dtype is None else jax_dtype(dtype))


@lowering("arange.default")
def arange(call, end, *, dtype=None, **placement):
    return arange_step(call, 0, end, 1, dtype=dtype)


@lowering("arange.start_step", "arange.start")
def arange_step(call, start, end, step=1, *, dtype=None, **placement):
    if dtype is None:
        dtype = jnp.int32 if all(isinstance(number, int) for number in (start, end, step)) else FLOAT
    return jnp.asarray(np.arange(start, end, step), jax_dtype(dtype))


@lowering("linspace.default")
def linspace(call, start, end, steps, *, dtype=None, **placement):
    return jnp.linspace(start, end, steps, dtype=FLOAT if dtype is None else jax_dtype(dtype))


@lowering("eye.default", "eye.m")
def eye(call, rows, columns=None, *, dtype=None, **placement):
    return jnp.eye(rows, columns, dtype=FLOAT if dtype is None else jax_dtype(dtype))


@lowering("tril_indices.default")
def tril_indices(call, rows, columns, offset=0, *, dtype=None, **placement):
    return jnp.stack([jnp.asarray(index) for index in np.tril_indices(rows, offset, columns)]).astype(
        jnp.int32 if dtype is None else jax_dtype(dtype)
    )


@lowering("triu_indices.default")
def triu_indices(call, rows, columns, offset=0, *, dtype=None, **placement):
    return jnp.stack([jnp.asarray(index) for index in np.triu_indices(rows, offset, columns)]).astype(
        jnp.int32 if dtype is None else jax_dtype(dtype)
    )


@lowering("range.default", "range.step")
def range_(call, start, end, step=1, *, dtype=None, **placement):
    """Compute torch.range, which includes the end."""
    count = int((end - start) / step) + 1
    return jnp.asarray(start + np.arange(count) * step, FLOAT if dtype is None else jax_dtype(dtype))


@lowering("fft_fftfreq.default")
def fftfreq(call, n, d=1.0, *, dtype=None, **placement):
    return jnp.asarray(np.fft.fftfreq(n, d), FLOAT if dtype is None else jax_dtype(dtype))


@lowering("fft_rfftfreq.default")
def rfftfreq(call, n, d=1.0, *, dtype=None, **placement):
    return jnp.asarray(np.fft.rfftfreq(n, d), FLOAT if dtype is None else jax_dtype(dtype))


def _window(length: int, periodic: bool, dtype, make):
    """Return a window. make: number of points -> a symmetric one; a periodic one drops the last point of one longer."""
    window = make(length + 1)[:-1] if periodic and length > 1 else make(length)
    window = jnp.asarray(window, FLOAT if dtype is None else jax_dtype(dtype))
    assert is_float(window)
    return window


@lowering("hann_window.default", "hann_window.periodic")
def hann_window(call, length, periodic=True, *, dtype=None, **placement):
    return _window(length, periodic, dtype, np.hanning)


@lowering("bartlett_window.default", "bartlett_window.periodic")
def bartlett_window(call, length, periodic=True, *, dtype=None, **placement):
    return _window(length, periodic, dtype, np.bartlett)


@lowering("blackman_window.default", "blackman_window.periodic")
def blackman_window(call, length, periodic=True, *, dtype=None, **placement):
    return _window(length, periodic, dtype, np.blackman)


@lowering(
    "hamming_window.default",
    "hamming_window.periodic",
    "hamming_window.periodic_alpha",
    "hamming_window.periodic_alpha_beta",
)
def hamming_window(call, length, periodic=True, alpha=0.54, beta=0.46, *, dtype=None, **placement):
    cosine = lambda n: alpha - beta * np.cos(2 * np.pi * np.arange(n) / max(n - 1, 1)) if n > 1 else np.ones(n)
    return _window(length, periodic, dtype, cosine)


@lowering("kaiser_window.default", "kaiser_window.periodic", "kaiser_window.beta")
def kaiser_window(call, length, periodic=True, beta=12.0, *, dtype=None, **placement):
    return _window(length, periodic, dtype, lambda n: np.kaiser(n, beta))
