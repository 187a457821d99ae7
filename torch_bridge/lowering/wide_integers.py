"""Compute in int64 where int32, JAX's width, may not hold the numbers: hashes, products of ids, long sums.

Every integer of a graph has bounds, derived from its operator and inputs. An operator whose result may exceed 32 bits
is computed in 64, and so is everything after it until the bounds fit again (by a remainder, a clamp). An operator
without a 64-bit form is refused by name.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.lowering.operators.reductions import axes_of

INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
COUNTER = (-(2**31) + 16, 2**31 - 16)  # assumed of int64 buffers: up to 15 more per call still fits
Bounds = tuple[int, int]

_GROWING = set(
    "add sub rsub mul neg abs square pow bitwise_left_shift __lshift__ sum prod cumsum cumprod mm bmm matmul mv dot "
    "addmm baddbmm addcmul lcm".split()
)
_KEEPING = _GROWING | set(
    "remainder fmod floor_divide div bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_right_shift __rshift__ eq "
    "ne lt le gt ge where clamp clamp_min clamp_max maximum minimum sign sgn _to_copy view reshape _unsafe_view expand "
    "permute transpose t unsqueeze squeeze slice select split split_with_sizes unbind cat stack repeat flip roll clone "
    "alias detach amax amin max min masked_fill full_like zeros_like ones_like item _local_scalar_dense logical_not "
    "any all copy tril triu lift_fresh_copy slice_scatter select_scatter type_as equal gcd constant_pad_nd "
    "sort argsort topk fill scalar_tensor full".split()
)
_TRUNCATING = ("aten._to_copy.default", "aten.type_as.default")
_PICKING = set("embedding gather index _unsafe_index index_select take embedding_bag _embedding_bag".split())
_PLACING = set(
    "index_put _unsafe_index_put index_add index_copy index_fill scatter scatter_add scatter_reduce put one_hot "
    "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward cross_entropy_loss".split()
)
_FLOATING = set(  # torch converts integers to float32 for these
    "reciprocal true_divide sqrt rsqrt exp exp2 expm1 log log1p log2 log10 sin cos tan sinh cosh tanh asin acos atan "
    "sigmoid erf erfc lgamma digamma".split()
)


def evaluate(lower: Callable, call, node: torch.fx.Node, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the lowering's result, computed in 64 bits if 32 may not hold it. call.bounds: of the nodes before."""
    name = str(node.target).split(".")[1]
    args = tuple(list(value) if isinstance(value, list) else value for value in args)  # JAX looks into plain lists only
    bounds = _bounds(name, node, call.bounds, args)
    whole = getattr(node.meta.get("val"), "dtype", None) is torch.int64
    leaves = jax.tree.leaves((args, kwargs))
    wide = any(getattr(leaf, "dtype", None) == np.int64 for leaf in leaves)
    far = any(type(leaf) is int and not _within((leaf, leaf), INT32) and abs(leaf) != INT64[1] for leaf in leaves)
    grows = whole and not _within(bounds, INT32) and (name in _GROWING or _truncates(node))
    asks = name.startswith(("_assert", "sym_"))
    if asks or not (wide or grows or (far and name in _KEEPING)):
        if whole and bounds != INT32:
            call.bounds[node] = bounds
        return lower(call, *args, **kwargs)
    if name in _PICKING or (name in _PLACING and not (whole and name != "one_hot")):
        args = (args[0], *jax.tree.map(_position, args[1:]))  # positions beyond 32 bits are errors in torch too
        if getattr(args[0], "dtype", None) != np.int64 or name == "one_hot":
            return lower(call, *jax.tree.map(_position, args), **kwargs)
    elif name == "after":
        with jax.enable_x64(True):
            return lower(call, *args)  # its values as they are, each in its width
    elif name in _FLOATING:
        return lower(call, *jax.tree.map(_floating, args), **kwargs)
    elif name not in _KEEPING:
        raise NotImplementedError(
            f"{node.target} of integers that may leave 32 bits: bring them into range before (a remainder or a clamp)"
        )
    with jax.enable_x64(True):
        given = jax.tree.map(_widened, (args, dict(kwargs)))
        result = lower(call, *given[0], **given[1])
    if whole:
        call.bounds[node] = (max(bounds[0], INT64[0]), min(bounds[1], INT64[1]))
    return _settled(result, node.meta.get("val"), whole and _within(bounds, INT32))


def _truncates(node: torch.fx.Node) -> bool:
    """Return True if a node makes int64 of floats, which may be any, and all its users have a 64-bit form."""
    taken = node.args[0] if node.args else None
    value = taken.meta.get("val") if isinstance(taken, torch.fx.Node) else None
    if str(node.target) not in _TRUNCATING or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    waiting, seen = [node], set()
    while waiting:
        for user in waiting.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if isinstance(user.target, torch._ops.OpOverload):
                name = str(user.target).split(".")[1]
                if name not in _KEEPING | _PICKING | _PLACING | _FLOATING or (name == "index" and _by_mask(user)):
                    return False
            elif user.target is not operator.getitem:
                return False
            if any(getattr(part, "dtype", None) is torch.int64 for part in pytree.tree_leaves(user.meta.get("val"))):
                waiting.append(user)
    return True


def _by_mask(node: torch.fx.Node) -> bool:
    return any(used.meta["val"].dtype is torch.bool for used in node.all_input_nodes[1:])


def array(value: Any) -> Any:
    """Return a number or array as the graph computes with it; int64 beyond 32 bits stays int64."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray) and value.dtype == np.int64 and not fits(value):
        with jax.enable_x64(True):
            return jnp.asarray(value)
    return jnp.asarray(value)


def fits(value: np.ndarray) -> bool:
    """Return True if every number is within 32 bits."""
    return not value.size or _within((int(value.min()), int(value.max())), INT32)


def as_wide(value: Any) -> jax.Array:
    """Return the integers as an int64 array."""
    with jax.enable_x64(True):
        return jnp.asarray(value, jnp.int64)


def stored(value: Any, like: Any) -> Any:
    """Return a buffer's new value in the width in which the buffer is kept. like: its present value."""
    if getattr(like, "dtype", None) == np.int64:
        return as_wide(value)
    return _position(value)


def outgrowing(graph: torch.fx.Graph, places: Mapping[str, str], written: Mapping[torch.fx.Node, str]) -> set[str]:
    """Return the names of int64 buffers whose values may exceed 32 bits after many calls of a graph.

    places: placeholder -> buffer. written: node of a buffer's new value -> buffer.
    """
    found: set[str] = set()
    while True:
        known: dict[torch.fx.Node, Bounds] = {}
        wide: set[torch.fx.Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder" and places.get(node.name) in found:
                wide.add(node)
            elif node.op == "placeholder" and node.name in places and _is_whole(node):
                known[node] = COUNTER
            elif isinstance(node.target, torch._ops.OpOverload):
                _follow(node, known, wide)
        new = {name for node, name in written.items() if node in wide} - found
        if not new:
            return found
        found |= new


def _follow(node: torch.fx.Node, known: dict[torch.fx.Node, Bounds], wide: set[torch.fx.Node]) -> None:
    """Note a node's bounds in `known`, and add it to `wide` if `evaluate` would keep its result in 64 bits."""
    name, whole = str(node.target).split(".")[1], _is_whole(node)
    bounds = _bounds(name, node, known, torch.fx.node.map_arg(node.args, lambda used: _shown(used, used in wide)))
    grows = whole and not _within(bounds, INT32) and (name in _GROWING or _truncates(node))
    if not grows and not any(used in wide for used in node.all_input_nodes):
        if whole and bounds != INT32:
            known[node] = bounds
        return
    if whole and (name not in _PICKING | _PLACING or node.args[0] in wide):
        known[node] = (max(bounds[0], INT64[0]), min(bounds[1], INT64[1]))
        if not _within(bounds, INT32):
            wide.add(node)


def _is_whole(node: torch.fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) is torch.int64


def _shown(node: torch.fx.Node, wide: bool) -> Any:
    """Return a node's shape and dtype, as `_bounds` needs them; its value if it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    hints = (size if isinstance(size, int) else size.node.hint for size in value.shape)
    shape = tuple(2**31 if hint is None else hint for hint in hints)  # the data decide how many rows a selection has
    return jax.ShapeDtypeStruct(shape, np.dtype("int64") if wide else jax_dtype(value.dtype))


def _within(bounds: Bounds, limits: Bounds) -> bool:
    return limits[0] <= bounds[0] and bounds[1] <= limits[1]


def _position(value: Any) -> Any:
    if getattr(value, "dtype", None) != np.int64:
        return value
    with jax.enable_x64(True):
        return jnp.clip(value, *INT32).astype(jnp.int32)


def _floating(value: Any) -> Any:
    if getattr(value, "dtype", None) != np.int64:
        return value
    with jax.enable_x64(True):
        return value.astype(jnp.float32)


def _widened(value: Any) -> Any:
    return value.astype(jnp.int64) if getattr(value, "dtype", None) == np.int32 else value


def _settled(result: Any, wanted: Any, narrow: bool) -> Any:
    """Return the result in the dtypes that the graph continues with."""
    if isinstance(result, (tuple, list)):
        values = wanted if isinstance(wanted, (tuple, list)) else [None] * len(result)
        return type(result)(_settled(part, value, narrow) for part, value in zip(result, values, strict=False))
    if not hasattr(result, "dtype"):
        return result
    if result.dtype == np.int64:
        return _position(result) if narrow else result
    return result if not isinstance(wanted, torch.Tensor) else result.astype(jax_dtype(wanted.dtype))


def _of(value: Any, known: Mapping[torch.fx.Node, Bounds], given: Any) -> Bounds:
    """Return the bounds of a node's argument. given: its value now."""
    if isinstance(value, torch.fx.Node) and value in known:
        return known[value]
    if isinstance(given, (bool, int)):
        return (int(given), int(given))
    dtype = getattr(given, "dtype", None)
    if dtype is None or dtype == np.int64:
        return INT64
    if dtype == np.bool_:
        return (0, 1)
    return (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) if np.issubdtype(dtype, np.integer) else INT64


def _hull(parts: list[Bounds]) -> Bounds:
    return (min(low for low, _ in parts), max(high for _, high in parts)) if parts else INT32


_SAME = set(
    "view reshape _unsafe_view expand permute transpose t unsqueeze squeeze slice select repeat flip roll clone alias "
    "detach amax amin max min lift_fresh_copy gather index index_select tril triu _to_copy".split()
)


def _bounds(name: str, node: torch.fx.Node, known: Mapping[torch.fx.Node, Bounds], args: Sequence[Any]) -> Bounds:
    """Return the bounds of a node's result; INT32 if nothing is known of a number that is stored in 32 bits."""
    of = lambda place: _of(node.args[place], known, args[place])
    if name in ("cat", "stack"):
        parts = zip(pytree.tree_leaves(node.args[0]), args[0], strict=True)
        return _hull([_of(part, known, given) for part, given in parts])
    if name == "arange":
        ends = [end for end in args if isinstance(end, int)]
        return _hull([(end, end) for end in ends] + [(0, 0)]) if len(ends) == len(args) else INT32
    if not args or not hasattr(args[0], "dtype") and name not in ("rsub", "mul", "add", "sub", "where", "full"):
        return INT32
    if name in _SAME:
        return _hull([of(0), (0, 0)] if name in ("tril", "triu") else [of(0)]) if of(0) != INT64 else INT64
    if name == "where":
        return _hull([of(1), of(2)])
    if name == "copy":
        return of(1)
    if name in ("select_scatter", "slice_scatter"):
        return _hull([of(0), of(1)])
    if name in ("neg", "abs", "square"):
        low, high = of(0)
        return {"neg": (-high, -low), "abs": (0, max(abs(low), abs(high)))}.get(name, (0, max(low * low, high * high)))
    if name in ("add", "sub", "rsub", "mul"):
        (a, b), (c, d) = of(0), of(1)
        scale = node.kwargs.get("alpha", 1) if name != "mul" else 1
        if not isinstance(scale, int):
            return INT64
        if name == "mul":
            corners = [x * y for x, y in itertools.product((a, b), (c, d))]
            return min(corners), max(corners)
        if name == "rsub":
            (a, b), (c, d) = (c, d), (a, b)
        c, d = sorted((c * scale, d * scale))
        return (a + c, b + d) if name == "add" else (a - d, b - c)
    if name in ("sum", "cumsum"):
        shape = args[0].shape
        summed = axes_of(args[0], args[1] if len(args) > 1 else node.kwargs.get("dim"))
        count = math.prod(shape[axis] for axis in summed) if name == "sum" else max(shape, default=1)
        low, high = of(0)
        return (min(low * count, low, 0), max(high * count, high, 0))
    if name == "remainder" and isinstance(args[1], int) and args[1]:
        return (0, args[1] - 1) if args[1] > 0 else (args[1] + 1, 0)
    if name in ("clamp", "clamp_min", "clamp_max"):
        low, high = of(0)
        limits: list[Any] = [*args[1:]] if name != "clamp_max" else [None, *args[1:]]
        floor = limits[0] if limits and isinstance(limits[0], int) else low
        top = limits[1] if len(limits) > 1 and isinstance(limits[1], int) else high
        return (max(low, floor), min(high, top)) if floor <= top else (min(floor, top), max(floor, top))
    if name == "bitwise_and" and len(args) > 1 and isinstance(args[1], int) and args[1] >= 0:
        return (0, args[1])
    return INT64 if name in _GROWING | {"bitwise_or", "bitwise_xor"} and of(0) != (0, 1) else _of(None, known, args[0])
