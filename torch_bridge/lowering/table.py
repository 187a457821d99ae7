"""The table of operators: name of an ATen operator -> the function that does the same with JAX arrays.

A lowering is called as `lowering(call, *args, **kwargs)` with the operator's own arguments: tensors are JAX arrays,
sizes Python ints, dtypes numpy dtypes, absent optional arguments fall back to the lowering's defaults, which are those
of the operator's schema. `call` is the `Call` below.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass
class Call:
    """Hold what a lowering may use besides the operator's arguments.

    rngs: source of random keys, `rngs()` gives the next one; None in evaluation, where sampling operators take keys
    from a fixed seed, so that evaluation repeats itself.
    valid: bool [batch] or None; rows that are padding and must not enter statistics over the batch.
    """

    rngs: Callable[[], jax.Array] | None = None
    valid: Any = None
    observe: Callable[[Any, Any], None] | None = None  # called with each node of the graph and its value
    bounds: dict = dataclasses.field(default_factory=dict)  # of integers, by node of the graph that runs
    _drawn: int = 0

    def key(self) -> jax.Array:
        if self.rngs is not None:
            return self.rngs()
        self._drawn += 1
        return jax.random.fold_in(jax.random.key(0), self._drawn)


TABLE: dict[str, Callable] = {}


def lowering(*names: str):
    """Decorator: the function lowers these operators, written without namespace where it is aten ("add.Tensor")."""

    def add(function: Callable) -> Callable:
        for name in names:
            TABLE[name if name.count(".") > 1 else f"aten.{name}"] = function
        return function

    return add


def register(name: str, function: Callable | None = None):
    """Add or replace a lowering: `register("my_ops.scale.default", lambda call, x, factor: x * factor)`.

    Also a decorator: `@register("aten.special_i0.default")`. The operator is then kept whole by the export, also where
    torch could take it apart. Modules converted before are not affected. Raises ValueError for a name that is not
    "namespace.operator.overload".
    """
    if name.count(".") != 2:
        raise ValueError(
            f"{name!r} is not the name of an operator: write namespace.operator.overload, as aten.add.Tensor"
        )

    def add(function: Callable) -> Callable:
        TABLE[name] = function
        return function

    return add if function is None else add(function)
