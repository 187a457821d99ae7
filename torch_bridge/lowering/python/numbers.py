"""Plain numbers that change from call to call (batch_idx, an epoch), in torch code that is recorded once.

Combined with tensors, a `Number` acts as a tensor of the record. When Python needs its value (in a comparison, a range,
a string), the current value answers and becomes a condition: the record holds for values that answer alike.
"""

import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.lowering.errors import MACHINERY, CannotRecord

MOST_PATHS = 8  # paths through the code, each recorded and compiled

Values = Mapping[str, Any]
_BINARY = "add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift".split()
_UFUNCS = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "true_divide": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod,
    "power": operator.pow,
}  # fmt: skip  # of a numpy scalar and a Number
_COMPARISONS = "eq ne lt le gt ge".split()


class Path:
    """One path through the code. conditions: (function of the values, its answer, line of user code that asked)."""

    __slots__ = ("conditions",)

    def __init__(self) -> None:
        self.conditions: list[tuple[Callable[[Values], Any], Any, str]] = []

    def holds(self, values: Values) -> bool:
        """Return True if every condition gives the same answer for these values."""
        for ask, answer, _ in self.conditions:
            try:
                got = ask(values)
            except (ArithmeticError, KeyError):  # a batch of another structure has other keys
                return False
            if type(got) is not type(answer) or got != answer:
                return False
        return True

    def number(self, name: str, values: Values, tensor: torch.Tensor) -> "Number":
        """Return the Number of this name: its current value, with the 0-d tensor that stands for it in the record."""
        return Number(self, values[name], lambda now: now[name], lambda: tensor, name)


class Paths:
    """Paths through a function that changing numbers have led to so far."""

    __slots__ = ("known", "name", "values")

    def __init__(self, name: str):
        self.name = name  # of the function, for messages
        self.known: list[Path] = []
        self.values: Values = {}

    def of(self, values: Values) -> int:
        """Return the index of the path that holds for these values, adding one without conditions if there is none.

        Raises CannotRecord if there are too many paths.
        """
        self.values = values
        for place, path in enumerate(self.known):
            if path.holds(values):
                return place
        if len(self.known) >= MOST_PATHS:
            lines = [where for path in self.known for _, _, where in path.conditions]
            raise CannotRecord(
                f"{self.name} asks of a number that changes from step to step what has led to {MOST_PATHS} programs "
                f"already, at {max(set(lines), key=lines.count)}: compute with the number itself, or with torch.where"
            )
        self.known.append(Path())
        return len(self.known) - 1


class Number:
    """A number on a path. value: the current one. of: computes it from the values. tensor: returns its 0-d tensor.
    form: its name, or the operator and operands that it is computed with; equal for equal computations."""

    __slots__ = ("form", "of", "path", "tensor", "value")
    __class__ = property(lambda self: type(self.value))  # type: ignore[assignment]  # for isinstance

    def __init__(
        self, path: Path, value: Any, of: Callable[[Values], Any], tensor: Callable[[], torch.Tensor], form: Any
    ):
        self.path, self.value, self.of, self.tensor, self.form = path, value, of, tensor, form

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Call the function with tensors in place of Numbers."""
        exchange = lambda item: item.tensor() if isinstance(item, Number) else item
        return function(*map(exchange, args), **{key: exchange(item) for key, item in (kwargs or {}).items()})

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """Answer Python from the current value, and keep the answer as a condition."""
        of = self.of
        answer = ask(self.value)
        self.path.conditions.append((lambda now: ask(of(now)), answer, _line()))
        return answer

    def plain(self) -> Any:
        """Return the current value; the record then holds for this value alone."""
        return self._asked(lambda value: value)

    def _with(self, other: Any, operate: Callable, reflected: bool) -> Any:
        ordered = (lambda a, b: operate(b, a)) if reflected else operate
        if isinstance(other, torch.Tensor):
            return ordered(self.tensor(), other)
        if isinstance(other, Number):
            of, mine, theirs = self.of, self.tensor, other
            return Number(
                self.path, ordered(self.value, other.value), lambda now: ordered(of(now), theirs.of(now)),
                lambda: ordered(mine(), theirs.tensor()), (operate, reflected, self.form, other.form)
            )  # fmt: skip
        if isinstance(other, (bool, int, float)):
            of, mine = self.of, self.tensor
            return Number(
                self.path, ordered(self.value, other), lambda now: ordered(of(now), other),
                lambda: ordered(mine(), other), (operate, reflected, self.form, type(other), other)
            )  # fmt: skip
        return NotImplemented

    def _compared(self, other: Any, operate: Callable) -> Any:
        if isinstance(other, torch.Tensor):
            return operate(self.tensor(), other)
        if isinstance(other, Number):
            return bool(self._with(other, operate, False))
        return self._asked(lambda value: operate(value, other))

    def _alone(self, operate: Callable) -> "Number":
        of, mine = self.of, self.tensor
        value, form = operate(self.value), (operate, self.form)
        return Number(self.path, value, lambda now: operate(of(now)), lambda: operate(mine()), form)

    def __neg__(self) -> "Number":
        return self._alone(operator.neg)

    def __pos__(self) -> "Number":
        return self

    def __abs__(self) -> "Number":
        return self._alone(abs)

    def __bool__(self) -> bool:
        return self._asked(bool)

    def __int__(self) -> int:
        return self._asked(int)

    __trunc__ = __int__

    def __index__(self) -> int:
        return self._asked(operator.index)

    def __float__(self) -> float:
        return self._asked(float)

    def __round__(self, digits: int | None = None) -> Any:
        return self._asked(lambda value: round(value, digits))

    def __floor__(self) -> int:
        return self._asked(math.floor)

    def __ceil__(self) -> int:
        return self._asked(math.ceil)

    def __divmod__(self, other: Any) -> tuple:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple:
        return other // self, other % self

    def __invert__(self) -> "Number":
        return self._alone(operator.invert)

    def __getattr__(self, name: str) -> Any:
        """Return what else an int or float has: bit_length, is_integer."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.plain(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.plain(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        operate = _UFUNCS.get(ufunc.__name__)
        scalars = all(isinstance(value, (Number, bool, int, float, np.generic)) for value in inputs)
        if operate is not None and method == "__call__" and scalars and not options:
            return operate(*(value.item() if isinstance(value, np.generic) else value for value in inputs))
        plain = (value.plain() if issubclass(type(value), Number) else value for value in inputs)
        return getattr(ufunc, method)(*plain, **options)

    def __hash__(self) -> int:
        return hash(self.plain())

    def __repr__(self) -> str:
        return repr(self.plain())

    def __str__(self) -> str:
        return str(self.plain())

    def __format__(self, spec: str) -> str:
        return format(self.plain(), spec)


class Given(Number):
    """Any other Python value that changes from call to call, such as a string: it can be compared and passed on."""

    __slots__ = ("name",)

    def __init__(self, path: Path, name: str, value: Any):
        super().__init__(path, value, lambda now: now[name], self._refuse, name)
        self.name = name

    def _refuse(self, *_: Any) -> Any:
        raise UserError(f"a {type(self.value).__name__} of the batch is read in Python, where it changes at every step")

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    __add__ = __radd__ = __mul__ = __mod__ = __iter__ = __len__ = __getitem__ = __contains__ = __call__ = _refuse


def _define(name: str) -> None:
    function = getattr(operator, name)
    name = name.rstrip("_")
    setattr(Number, f"__{name}__", lambda self, other: self._with(other, function, False))
    setattr(Number, f"__r{name}__", lambda self, other: self._with(other, function, True))


def _define_comparison(name: str) -> None:
    function = getattr(operator, name)
    setattr(Number, f"__{name}__", lambda self, other: self._compared(other, function))


for _name in _BINARY:
    _define(_name)
for _name in _COMPARISONS:
    _define_comparison(_name)


def _line() -> str:
    """Return the innermost line of user code, as file:line."""
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename == __file__ or any(part in frame.f_code.co_filename for part in MACHINERY)
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"
