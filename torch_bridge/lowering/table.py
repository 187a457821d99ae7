"""Table of lowerings: name of an ATen operator -> the function that computes it on JAX arrays.

A lowering is called as `lowering(call, *args, **kwargs)` with the operator's own arguments: tensors are JAX arrays,
sizes Python ints, dtypes torch's (`dtypes.jax_dtype` converts them). Optional arguments may be absent: the lowering's
defaults are those of the operator's schema. `call` is the `Call` below.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass
class Call:
    """Context of a call: everything a lowering may use besides the operator's arguments.

    rngs: `rngs()` returns the next random key. None in evaluation: sampling operators then take keys from a fixed seed,
    so that evaluation repeats itself. valid: bool [batch] or None; False marks padding rows, which must not enter
    statistics over the batch.
    """

    rngs: Callable[[], jax.Array] | None = None
    valid: Any = None
    observe: Callable[[Any, Any], Any] | None = None  # (node of the graph, its value) -> the value to go on with
    bounds: dict = dataclasses.field(default_factory=dict)  # (low, high) of integers, by node of the running graph
    draw: tuple | None = None  # (part, operator, run): every run of the part draws the same random numbers
    base: jax.Array | None = None  # key that an operator's own keys follow from, so that two graphs draw the same
    _drawn: int = 0
    _drawn_for: dict = dataclasses.field(default_factory=dict)  # keys of an operator's first run

    def key(self) -> jax.Array:
        if self.draw is None:
            return self._new_key()
        *operator, run = self.draw
        drawn, counts = self._drawn_for.setdefault(tuple(operator), ([], {}))
        place = counts[run] = counts.get(run, -1) + 1
        if self.base is not None:
            return jax.random.fold_in(jax.random.fold_in(self.base, zlib.crc32(repr(operator).encode())), place)
        if place == len(drawn):
            drawn.append(self._new_key())
        return drawn[place]

    def _new_key(self) -> jax.Array:
        if self.rngs is not None:
            return self.rngs()
        self._drawn += 1
        return jax.random.fold_in(jax.random.key(0), self._drawn)


TABLE: dict[str, Callable] = {}


def lowering(*names: str):
    """Decorate the lowering of these operators; "add.Tensor" without a namespace means aten.add.Tensor."""

    def add(function: Callable) -> Callable:
        for name in names:
            TABLE[name if name.count(".") > 1 else f"aten.{name}"] = function
        return function

    return add


def register(name: str, function: Callable | None = None):
    """Add or replace a torch operator's lowering; also a decorator.

    The export then keeps the operator whole, even where torch could decompose it. Modules converted before are not
    affected.

    Args:
        name: "namespace.operator.overload", as aten.special_i0.default.
        function: (call, the operator's arguments) -> JAX arrays.

    Raises:
        ValueError: for a name of another form.

    Examples:
        >>> from torch_bridge import lowering
        >>> @lowering.register("my_ops.scale.default")
        ... def scale(call, x, factor):
        ...     return x * factor
    """
    if name.count(".") != 2:
        raise ValueError(
            f"{name!r} is not the name of an operator: write namespace.operator.overload, as aten.add.Tensor"
        )

    def add(function: Callable) -> Callable:
        TABLE[name] = function
        return function

    return add if function is None else add(function)
