"""Decide what a change of a Python value that a recorded function reads requires: an input, or another record."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge.lowering.errors import CannotRecord, unreadable
from torch_bridge.lowering.python.changing import ChangingNumber
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.places import PLAIN, OfTensor, is_plain, same

MOST_KEPT = 32  # arrangements of objects that are remembered


class Varying:
    """Follow the values of a function's Python inputs from call to call.

    dynamic: numbers that have changed, now inputs of the compiled step, in order. fixed: other values that have
    changed: each combination has its own record, as has each arrangement of the objects that hold them.
    """

    def __init__(self, function: Callable, modules: Mapping[str, torch.nn.Module]):
        self.inputs = PythonInputs(function, modules)
        self.dynamic: list[int] = []
        self.fixed: set[int] = set()
        self._last = self.inputs.values()
        self._arrangement = self._made = 0
        self._exchanged: list[str] = []
        self.anew = 0  # calls so far with a function that no call before has had
        self._idle: dict[tuple, set[int]] = {}  # dynamic numbers that nothing reads, by what is constant
        self._known: dict[tuple, tuple[int, list]] = {self.inputs.signature(): (0, self.inputs.objects())}
        self._renew()

    def __deepcopy__(self, memo: Any) -> "Varying":
        return self  # a copied step reads the same Python values

    def state(self) -> tuple[tuple, list[ChangingNumber]]:
        """Return a key that selects the record, and the dynamic numbers. Raises CannotRecord if what the code reads
        raises when it is looked at."""
        try:
            return self._now()
        except CannotRecord:
            raise
        except Exception as error:
            raise unreadable("", None, error) from error

    def _now(self) -> tuple[tuple, list[ChangingNumber]]:
        moved = self.inputs.moved()
        if moved:
            new, known = self.inputs.new_functions(), self._made
            self._exchanged = moved
            self._look_again()
            self.anew += new and self._made > known
        values = self.inputs.values()
        if not all(map(operator.is_, values, self._last)):
            changed = [n for n, value in enumerate(values) if not same(self._last[n], value)]
            if not all(is_plain(values[number]) for number in changed):  # an object replaced a plain value
                self._look_again()
                return self._now()
            for number in changed:
                if number not in self.fixed:
                    self._take(number, self._last[number], values[number])
            self._last = values
            if changed:
                self._renew()
        return self._state

    def _look_again(self) -> None:
        """Find the places anew after objects or items were exchanged; match old places by name."""
        last = {place.name: value for place, value in zip(self.inputs.places, self._last, strict=True)}
        dynamic, fixed = self.names(self.dynamic), self.names(sorted(self.fixed))
        self.inputs.look()
        numbers = {place.name: number for number, place in enumerate(self.inputs.places)}
        self.dynamic = [numbers[name] for name in dynamic if name in numbers]
        self.fixed = {numbers[name] for name in fixed if name in numbers}
        self._last = [last.get(name, value) for name, value in zip(numbers, self.inputs.values(), strict=True)]
        signature = self.inputs.signature()
        if signature not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._made += 1
            self._known[signature] = self._made, self.inputs.objects()  # whose ids the signature holds
        self._arrangement = self._known[signature][0]
        self._renew()

    def _take(self, number: int, old: Any, new: Any) -> None:
        constant = isinstance(self.inputs.places[number].container, OfTensor)
        if constant or not (_is_number(old) and _is_number(new)):
            self.fixed.add(number)
            if number in self.dynamic:
                self.dynamic.remove(number)
        elif number not in self.dynamic:
            self.dynamic.append(number)

    def _renew(self) -> None:
        apart = self.fixed if self._made == 0 else {*range(len(self._last))} - {*self.dynamic}
        fixed = tuple((number, _key(self._last[number])) for number in sorted(apart))
        kinds = tuple(type(self._last[number]) for number in self.dynamic)  # code may ask for them
        self._constant = self._arrangement, kinds, *fixed
        idle = self._idle.get(self._constant, set())
        dynamic = tuple(number for number in self.dynamic if number not in idle)
        self._state: tuple[tuple, list[ChangingNumber]] = (dynamic, self._constant), self.changing(dynamic)

    def leave_out(self, idle: set[int]) -> tuple[tuple, list[ChangingNumber]]:
        """Leave out dynamic numbers that no record for the present constants reads; return the new state.

        idle: those that the latest of these records does not read.
        """
        before = self._idle.get(self._constant)
        self._idle[self._constant] = idle if before is None else idle & before
        self._renew()
        return self._state

    def changing(self, numbers: Sequence[int]) -> list[ChangingNumber]:
        """Return the last values of these places."""
        return [ChangingNumber(self._last[number]) for number in numbers]

    def branch_on(self, numbers: Sequence[int]) -> None:
        """Treat these dynamic numbers as fixed from now on, because Python itself needs their values."""
        self.dynamic = [number for number in self.dynamic if number not in numbers]
        self.fixed.update(numbers)
        self._renew()

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Return the places' names."""
        return [self.inputs.places[number].name for number in numbers]

    def described(self) -> str:
        """Say what has required other records: values that Python branches on, or objects that are new at each call."""
        if self.fixed or not self._exchanged:
            return f"Python branches on {', '.join(self.names(sorted(self.fixed))[:3])}"
        return f"{', '.join(self._exchanged[:3])} is another object from call to call"


def _key(value: Any) -> Any:
    return value if isinstance(value, (*PLAIN, tuple)) else id(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating))
