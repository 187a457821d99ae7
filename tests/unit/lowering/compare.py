"""One operator, one set of arguments: torch against the table, values and gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from torch_bridge.datasets import to_numpy
from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.table import Call

FLOATS = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


PROPERTY = settings(
    max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)


@dataclasses.dataclass
class Case:
    """args, kwargs: of the operator. gradient: compare gradients too. outputs: how many results count. scale: of the
    tolerance. fixed: tensors that torch does not differentiate by."""

    args: tuple
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradient: bool = True
    outputs: int | None = None
    scale: float = 1.0
    fixed: tuple = ()


def cases() -> tuple[dict[str, Callable], Callable]:
    """Return an empty table of cases by operator, and the decorator that enters a function under aten's names."""
    table: dict[str, Callable] = {}

    def case(*names: str) -> Callable:
        def add(function: Callable) -> Callable:
            for name in names:
                table[f"aten.{name}"] = function
            return function

        return add

    return table, case


class Draw:
    """Arguments by chance: hypothesis chooses shapes, kinds and options, numpy fills in numbers."""

    def __init__(self, data):
        self._data = data
        self.rng = np.random.default_rng(self.int(0, 2**16))

    def __call__(self, strategy):
        return self._data.draw(strategy)

    def int(self, low: int, high: int) -> int:
        return self(st.integers(low, high))

    def one(self, *choices):
        return self(st.sampled_from(choices))

    def flag(self) -> bool:
        return self(st.booleans())

    def number(self, low: float = -2, high: float = 2) -> float:
        return round(float(self.rng.uniform(low, high)), 3)

    def shape(self, low: int = 0, high: int = 4, smallest: int = 0, largest: int = 4) -> tuple[int, ...]:
        return tuple(self(st.lists(st.integers(smallest, largest), min_size=low, max_size=high)))

    def floats(self, shape, low: float = -2, high: float = 2, dtype=torch.float32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.rng.uniform(low, high, shape), np.float32)).to(dtype)

    def ints(self, shape, low: int = -5, high: int = 5, dtype=torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.rng.integers(low, high + 1, shape))).to(dtype)

    def bools(self, shape) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.rng.random(shape) < 0.5))

    def any(self, shape, low: float = -2, high: float = 2) -> torch.Tensor:
        """Of any dtype."""
        kind = self.one("float", "float", "int", "bool")
        if kind == "float":
            return self.floats(shape, low, high, self.one(*FLOATS))
        if kind == "bool":
            return self.bools(shape)
        dtype = self.one(*INTEGERS)
        return self.ints(shape, 0 if dtype == torch.uint8 else int(low), max(int(high), 1), dtype)

    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two shapes that broadcast together."""
        shape = self.shape()
        other = tuple(self.one(size, 1) for size in shape)[self.int(0, len(shape)) :]
        return (shape, other) if self.flag() else (other, shape)

    def dim(self, ndim: int) -> int:
        """A dimension, counted from either end."""
        return self.int(-ndim, ndim - 1) if ndim else self.one(0, -1)

    def dims(self, ndim: int, least: int = 0) -> list[int]:
        chosen = self(st.lists(st.integers(0, max(ndim - 1, 0)), min_size=min(least, ndim), max_size=ndim, unique=True))
        return [dim - ndim if self.flag() else dim for dim in chosen] if ndim else []


def operator(name: str):
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def installed(name: str) -> bool:
    """Return True if this torch has the operator; some go (aten.cholesky in 2.14)."""
    try:
        return operator(name) is not None
    except AttributeError:
        return False


def check(name: str, case: Case) -> None:
    """The table's lowering, compiled, gives torch's dtypes, shapes, values and gradients."""
    leaves, spec = pytree.tree_flatten((case.args, case.kwargs))
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fixed = {id(tensor) for tensor in case.fixed}
    places = [i for i in tensors if _differentiable(leaves[i]) and id(leaves[i]) not in fixed] if case.gradient else []
    leaves = [leaf.detach().requires_grad_() if index in places else leaf for index, leaf in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    theirs = _results(operator(name)(*args, **kwargs), case)
    wanted = [index for index, result in enumerate(theirs) if _differentiable(result) and result.requires_grad]
    rng = np.random.default_rng(0)
    weights = [torch.from_numpy(np.asarray(rng.normal(size=theirs[i].shape))).to(theirs[i].dtype) for i in wanted]
    slopes = []
    if wanted:
        inputs = [leaves[index] for index in places]
        slopes = torch.autograd.grad([theirs[i] for i in wanted], inputs, weights, allow_unused=True)

    arrays = {index: jnp.asarray(to_numpy(leaves[index])) for index in tensors}
    ours, ours_slopes = _compiled(name, case, leaves, spec, places, wanted, arrays, list(map(to_numpy, weights)))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            assert mine == other
            continue
        assert mine.shape == tuple(other.shape), (mine.shape, tuple(other.shape))
        assert mine.dtype == jax_dtype(other.dtype), (mine.dtype, other.dtype)
        _close(mine, other.detach(), case)
    for mine, other, index in zip(ours_slopes, slopes, places if wanted else (), strict=True):
        other = torch.zeros_like(leaves[index]) if other is None or other._is_zerotensor() else other
        if other.is_complex():
            mine = np.conj(mine)  # JAX's convention for complex gradients is the conjugate of torch's
        _close(mine, other.detach(), dataclasses.replace(case, scale=case.scale * 5))


def _compiled(name, case, leaves, spec, places, wanted, arrays, weights):
    """Results and, for a weighted sum of those that are `wanted`, gradients of the leaves at `places`."""

    def run(arrays, weights):
        def results(*values):
            filled = [arrays.get(index, leaf) for index, leaf in enumerate(leaves)]
            for index, value in zip(places, values, strict=True):
                filled[index] = value
            args, kwargs = pytree.tree_unflatten(filled, spec)
            every = _results(TABLE[name](Call(), *args, **kwargs), case)
            return [every[index] for index in wanted], every

        if not wanted:
            return results(*(arrays[index] for index in places))[1], ()
        some, pull, every = jax.vjp(results, *(arrays[index] for index in places), has_aux=True)
        return every, pull([jnp.asarray(w).astype(r.dtype) for w, r in zip(weights, some, strict=True)])

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(arrays, weights)


def _results(value: Any, case: Case) -> list:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return values[: case.outputs]


def _close(mine, other: torch.Tensor, case: Case) -> None:
    mine, wanted = np.asarray(mine), to_numpy(other.resolve_conj())
    if not (other.is_floating_point() or other.is_complex()):
        np.testing.assert_array_equal(mine.astype(np.int64), wanted.astype(np.int64))
        return
    tolerance = TOLERANCE.get(other.dtype, 2e-5) * case.scale
    kind = np.complex128 if other.is_complex() else np.float64
    mine, wanted = mine.astype(kind), wanted.astype(kind)
    size = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
    np.testing.assert_allclose(mine, wanted, rtol=tolerance, atol=tolerance * size)


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
