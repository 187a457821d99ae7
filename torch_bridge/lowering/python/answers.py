"""Answers that Python gets of changing numbers while a function is recorded, which become conditions of the record.

In a branch, a comparison, a range or `int()`, the present value answers; the record holds for values that answer alike.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_COMPUTED: dict[str, Callable] = {
    "add": operator.add,
    "radd": lambda a, b: b + a,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "rmul": lambda a, b: b * a,
    "truediv": operator.truediv,
    "div": operator.truediv,
    "true_divide": operator.truediv,
    "rtruediv": lambda a, b: b / a,
    "rdiv": lambda a, b: b / a,
    "floordiv": operator.floordiv,
    "floor_divide": operator.floordiv,
    "rfloordiv": lambda a, b: b // a,
    "mod": operator.mod,
    "remainder": operator.mod,
    "rmod": lambda a, b: b % a,
    "pow": operator.pow,
    "rpow": lambda a, b: b**a,
    "neg": operator.neg,
    "negative": operator.neg,
    "pos": operator.pos,
    "positive": operator.pos,
    "abs": abs,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_ASKED: dict[str, Callable] = {
    "bool": bool,
    "int": int,
    "float": float,
    "index": operator.index,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "divmod": divmod,
    "rdivmod": lambda a, b: divmod(b, a),
}
_PLAIN = (bool, int, float)


class Unknown(Exception):
    """Error for what Python raises for, or does not compute of numbers alone."""


@dataclasses.dataclass(frozen=True)
class Of:
    """A changing number, or what Python computes of some. place: among all of a record, in order."""

    place: int


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Answers that Python has had in one call.

    given: input of each number. computed: (operator, arguments), in order, after the given ones. asked: (question,
    arguments, text of the answer).
    """

    given: tuple[int, ...]
    computed: tuple[tuple[str, tuple], ...]
    asked: tuple[tuple[str, tuple, str], ...]

    def hold(self, values: Mapping[int, Any]) -> bool:
        """Return True if Python gets the same answers for these values of the inputs."""
        known = [values[place] for place in self.given]
        of = lambda arguments: (known[x.place] if type(x) is Of else x for x in arguments)
        try:
            for name, arguments in self.computed:
                known.append(_COMPUTED[name](*of(arguments)))
            return all(repr(_ASKED[name](*of(arguments))) == answer for name, arguments, answer in self.asked)
        except (ArithmeticError, TypeError, ValueError):
            return False


class Answers:
    """Python's arithmetic on changing numbers in one call of a recorded function, with the present values."""

    def __init__(self, numbers: Mapping[int, Any]):
        """numbers: present values, by position among the record's inputs."""
        self._given = tuple(numbers)
        self._values = list(numbers.values())
        self._computed: list[tuple[str, tuple]] = []
        self._asked: dict[tuple, tuple[str, tuple, str]] = {}

    def numbers(self) -> dict[int, Of]:
        """Return the given numbers by position."""
        return {place: Of(number) for number, place in enumerate(self._given)}

    def value(self, number: Of) -> Any:
        """Return the present value."""
        return self._values[number.place]

    def compute(self, name: str, arguments: Sequence[Any]) -> Of:
        """Follow an operator. Raises Unknown."""
        self._values.append(self._of(_COMPUTED, name, arguments))
        self._computed.append((name, tuple(arguments)))
        return Of(len(self._values) - 1)

    def ask(self, name: str, arguments: Sequence[Any]) -> Any:
        """Answer for the present values, and keep that as a condition. Raises Unknown."""
        answer = self._of(_ASKED, name, arguments)
        self._asked[name, repr(arguments)] = name, tuple(arguments), repr(answer)
        return answer

    def _of(self, functions: Mapping[str, Callable], name: str, arguments: Sequence[Any]) -> Any:
        if name not in functions or not all(type(x) in (Of, *_PLAIN) for x in arguments):
            raise Unknown(name)
        try:
            return functions[name](*(self.value(x) if type(x) is Of else x for x in arguments))
        except (ArithmeticError, TypeError, ValueError) as error:
            raise Unknown(name) from error

    def conditions(self) -> Conditions:
        """Return what was asked so far, with what leads to it."""
        count = len(self._given)
        needed = _numbers(arguments for _, arguments, _ in self._asked.values())
        for place in reversed(range(count, len(self._values))):
            if place in needed:
                needed |= _numbers([self._computed[place - count][1]])
        order = sorted(needed)
        places = {place: number for number, place in enumerate(order)}
        renamed = lambda arguments: tuple(Of(places[x.place]) if type(x) is Of else x for x in arguments)
        computed = [self._computed[place - count] for place in order if place >= count]
        return Conditions(
            tuple(self._given[place] for place in order if place < count),
            tuple((name, renamed(arguments)) for name, arguments in computed),
            tuple((name, renamed(arguments), answer) for name, arguments, answer in self._asked.values()),
        )


def _numbers(arguments: Any) -> set[int]:
    return {x.place for several in arguments for x in several if type(x) is Of}
