"""cuDNN's attention as a custom call of XLA, forward and backward, without jax's checks of the present device. So a
program compiled for a GPU that you don't have is the program that runs there.

Source: the custom call of jax.nn.dot_product_attention(implementation="cudnn"), which this equals operand by operand.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.runtime import xla_flags

_ALGORITHM = {
    "algo_id": "0",
    "math_type": "TENSOR_OP_MATH",
    "tuning_knobs": {"17": "1", "24": "0"},
    "is_cudnn_frontend": True,
    "workspace_size": "0",
}
_ROW_MAJOR = {
    "dim_level_types": [],
    "dim_unique": [],
    "dim_ordered": [],
    "minor_to_major": ["3", "2", "1", "0"],
    "tiles": [],
    "element_size_in_bits": "0",
    "memory_space": "0",
    "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
    "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
    "dynamic_shape_metadata_prefix_bytes": "0",
}
_FORWARD = {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))}
_BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}
_deterministic: contextvars.ContextVar[bool | None] = contextvars.ContextVar("deterministic", default=None)
_BY_HEAD = (0, 2, 1, 3)  # results are [batch, head, token, width], laid out [batch, token, head, width] in memory


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """State, for programs traced in this context, whether XLA compiles them with deterministic operations.

    For other programs XLA_FLAGS decides. With deterministic operations, XLA asks cuDNN for a deterministic backward
    pass, but marks only the call of the first layer. The calls of equal layers then don't find the compiled kernel
    (openxla/xla#46500, an IndexError). So here all calls are marked.
    """
    token = _deterministic.set(wanted)
    try:
        yield
    finally:
        _deterministic.reset(token)


def traced_as(function: Callable, wanted: bool) -> Callable:
    """Return the function, traced under `deterministic(wanted)`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with deterministic(wanted):
            return function(*args, **kwargs)

    return run


def _is_deterministic() -> bool:
    said = _deterministic.get()
    return xla_flags.is_deterministic(False) if said is None else said


class Kind(NamedTuple):
    """A call's static options. window: number of visible tokens before a query; 0: all. padded: lengths are given.
    biased: a bias is given. deterministic: see `deterministic`."""

    scale: float
    causal: bool
    window: int
    padded: bool
    biased: bool
    deterministic: bool

    @property
    def mask(self) -> str:
        names = {(0, 0): "NO_MASK", (1, 0): "PADDING", (0, 1): "CAUSAL", (1, 1): "PADDING_CAUSAL"}
        return names[self.padded, self.causal]


def attention(q, k, v, *, bias=None, lengths=None, causal=False, window=0, scale=None):
    """Compute softmax(q k^T scale + bias) v. q: [batch, query, head, width]; k, v: [batch, key, kv head, width]; bias:
    [1 or batch, 1 or head, query, key] in q's dtype; lengths: int32 [batch], the number of visible keys."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kind = Kind(scale, causal, window, lengths is not None, bias is not None, _is_deterministic())
    return _attend(kind, q, k, v, [] if bias is None else [bias], [] if lengths is None else [lengths])


def forward(q, k, v, *, lengths=None, causal=False, scale=1.0):
    """Compute `attention` and the log of each softmax's sum, float32 [batch, head, query]."""
    kind = Kind(scale, causal, 0, lengths is not None, False, _is_deterministic())
    y, kept = _forward(kind, q, k, v, [], [] if lengths is None else [lengths])
    return y, kept[-1]


def backward(q, k, v, y, total, grad, *, lengths=None, causal=False, scale=1.0):
    """Return the gradients of q, k and v. y, total: result and logs of sums, possibly of more keys than k holds."""
    kind = Kind(scale, causal, 0, lengths is not None, False, _is_deterministic())
    return _backward(kind, (q, k, v, [], [] if lengths is None else [lengths], y, total), grad)[:3]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kind: Kind, q, k, v, bias, lengths):
    shape, _ = _shapes(q, k)
    (y,) = _call(kind, False, (q, k), (q, k, v, *bias, *_lengths(q, lengths)), [(shape, q.dtype)])
    return y


def _forward(kind, q, k, v, bias, lengths):
    shape, statistics = _shapes(q, k)
    results = [(shape, q.dtype), (statistics, jnp.float32)]
    y, kept = _call(kind, False, (q, k), (q, k, v, *bias, *_lengths(q, lengths)), results)
    return y, (q, k, v, bias, lengths, y, kept)


def _backward(kind, residuals, grad):
    q, k, v, bias, lengths, y, kept = residuals
    operands = (q, k, v, kept, grad, *bias, y, *_lengths(q, lengths))
    results = [(_heads_first(x.shape), x.dtype) for x in (q, k, v)]
    results += [(each.shape, each.dtype) for each in bias]
    gradients = _call(kind, True, (q, k), operands, results)
    return *gradients[:3], gradients[3:], [None for _ in lengths]


_attend.defvjp(_forward, _backward)


def _call(kind: Kind, backward: bool, like, operands, results):
    """Make the custom call; return arrays [batch, head, token, width] as [batch, token, head, width]."""
    name = f"__cudnn$fmha{'ScaleBias' if kind.biased else ''}Softmax{'Backward' if backward else ''}"
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    mine = 3 if backward else 1  # number of results that are [batch, head, token, width]
    layouts = [_BY_HEAD if place < mine else tuple(range(len(x.shape))) for place, x in enumerate(results)]
    call = jax.ffi.ffi_call(
        name,
        [*results, workspace],
        output_layouts=[*layouts, (0,)],
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=_config(kind, backward, *like),
    )
    found = call(*operands)[:-1]
    return [jnp.swapaxes(x, 1, 2) if place < mine else x for place, x in enumerate(found)]


def _config(kind: Kind, backward: bool, q, k) -> str:
    batch, queries, heads, _ = q.shape
    numbers = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(axis) for axis in left_batch],
            "rhs_batch_dimensions": [str(axis) for axis in right_batch],
        }
        for name, ((left, right), (left_batch, right_batch)) in (_BACKWARD if backward else _FORWARD).items()
    }
    config = {
        "algorithm": _ALGORITHM,
        "fmha_scale": kind.scale,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
            "dimensions": [str(n) for n in (batch, heads, queries, k.shape[1])],
            "tuple_shapes": [],
            "layout": _ROW_MAJOR,
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": kind.mask,
        **numbers,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": kind.window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    if backward and kind.deterministic:
        config["force_deterministic"] = True
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


def _lengths(q, lengths):
    """Return the lengths of queries (all of them) and of keys, or nothing."""
    return [jnp.full(len(q), q.shape[1], jnp.int32), lengths[0]] if lengths else []


def _shapes(q, k):
    """Return the shapes of the result and of the softmax's statistics for the backward pass."""
    return _heads_first(q.shape), (q.shape[0], q.shape[2], q.shape[1])


def _heads_first(shape):
    batch, tokens, heads, width = shape
    return batch, heads, tokens, width
