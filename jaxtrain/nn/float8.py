"""Products of linear layers in 8 bits (`precision.policy: fp8`): e4m3 in the forward pass, e5m2 for gradients.

Every tensor is scaled by its own largest value at the time of the product, so no scale is kept from step to step.
Source: Micikevicius et al. 2022, sec. 3 (the formats and their uses); torchao's "tensorwise" recipe.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
UNIT = 16  # a GPU's kernels need widths that are multiples of this
LEAST_CAPABILITY = (8, 9)
_on: contextvars.ContextVar[bool] = contextvars.ContextVar("float8", default=False)


def lacking(platform: str, capability: tuple[int, int] | None) -> str | None:
    """Return a text on what the device lacks for 8-bit products, None if it has them. A CPU emulates them."""
    if platform == "cpu" or (capability is not None and capability >= LEAST_CAPABILITY):
        return None
    if capability is None:
        return "is offered on GPUs"
    return f"needs a GPU of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later (H100, L40S)"


@contextlib.contextmanager
def products(wanted: bool) -> Iterator[None]:
    """Set whether linear layers traced in this context multiply in 8 bits."""
    token = _on.set(wanted)
    try:
        yield
    finally:
        _on.reset(token)


def takes(x, weight) -> bool:
    """Return True if x [..., in] and weight [out, in] are multiplied in 8 bits: bfloat16, widths multiples of 16."""
    wide = x.ndim > 1 and weight.ndim == 2 and not any(size % UNIT for size in weight.shape)
    return _on.get() and wide and weight.dtype == jnp.bfloat16


@jax.custom_vjp
def product(x, weight):
    """Compute x W^T in 8 bits. x: bfloat16 [..., in]; weight: bfloat16 [out, in]; result: bfloat16 [..., out]."""
    return _forward(x, weight)[0]


def _forward(x, weight):
    x, weight = scaled(x, FORWARD), scaled(weight, FORWARD)
    return _times(x, weight, x[0].ndim - 1, 1), (x, weight)


def _backward(kept, grad):
    x, weight = kept
    grad = scaled(grad, BACKWARD)
    lead = tuple(range(grad[0].ndim - 1))
    return _times(grad, weight, grad[0].ndim - 1, 0), _times(grad, x, lead, lead)


product.defvjp(_forward, _backward)


def scaled(x, dtype):
    """Return the array divided by its scale, in 8 bits, and the scale in float32. The scale maps the array's largest
    value to the format's. An array with a value that is not finite gives NaN in every product."""
    largest = jnp.abs(x).max().astype(jnp.float32)
    scale = jnp.where(largest == 0, 1.0, largest / float(jnp.finfo(dtype).max))
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _times(left, right, left_axes, right_axes):
    """Multiply two scaled arrays over the given axes and undo their scales."""
    as_tuple = lambda axes: axes if isinstance(axes, tuple) else (axes,)
    over = ((as_tuple(left_axes), as_tuple(right_axes)), ((), ()))
    y = jax.lax.dot_general(left[0], right[0], over, preferred_element_type=jnp.float32)
    return (y * (left[1] * right[1])).astype(jnp.bfloat16)
