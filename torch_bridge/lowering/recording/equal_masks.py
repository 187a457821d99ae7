"""`out[y > 0]` and `target[y > 0]`: a mask that is computed twice selects as many rows both times.

torch.export gives every mask a length of its own. While a module is recorded, a mask that is computed of the same
tensors by the same functions as an earlier one stands for it wherever it selects.
"""

from collections.abc import Mapping
from typing import Any

import torch

_PURE = frozenset(
    "gt ge lt le eq ne isnan isinf isfinite isin isposinf isneginf isclose greater greater_equal less less_equal "
    "not_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not and or "
    "xor invert any all bool view reshape flatten ravel squeeze unsqueeze transpose swapaxes t permute getitem "
    "contiguous detach abs neg long int float double sum argmax amax".split()
)
_SELECT = frozenset("getitem setitem masked_select nonzero where argwhere index_put".split())


class EqualMasks:
    """The masks of one recording, and what each was computed of."""

    def __init__(self):
        self._numbers: dict[tuple, int] = {}  # of every way in which a tensor was computed
        self._made: dict[int, tuple[torch.Tensor, int, int | None]] = {}  # a tensor, its version, and its way
        self._first: dict[int, torch.Tensor] = {}  # by way

    def note(self, function: Any, args: tuple, kwargs: Mapping[str, Any], result: Any) -> None:
        """Remember what a function has made of its arguments."""
        name = _name(function)
        if name in _PURE and isinstance(result, torch.Tensor) and not any(result is given for given in args):
            made_of = (name, self._key(args), self._key(kwargs))
            what = self._numbers.setdefault(made_of, len(self._numbers))
            self._made[id(result)] = (result, result._version, what)
            if result.dtype == torch.bool:
                self._first.setdefault(what, result)

    def joined(self, function: Any, args: tuple) -> tuple:
        """The arguments of a function that selects, with earlier masks in place of equal ones."""
        return self._join(args) if _name(function) in _SELECT else args

    def _join(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._join, value))
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
            return value
        what = self._what(value)
        first = self._first.get(what, value) if isinstance(what, int) else value
        return first if self._what(first) == what else value

    def _what(self, tensor: torch.Tensor) -> Any:
        """The way in which it was computed; itself and its version where that is not known, or it was written to."""
        held, version, what = self._made.get(id(tensor), (None, None, None))
        if held is not tensor:
            self._made[id(tensor)] = (tensor, tensor._version, None)  # alive, so that its id stays its own
        known = held is tensor and version == tensor._version
        return what if known and what is not None else (id(tensor), tensor._version)

    def _key(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._what(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._key, value))
        if isinstance(value, Mapping):
            return tuple((name, self._key(inner)) for name, inner in value.items())
        if isinstance(value, slice):
            return "slice", self._key((value.start, value.stop, value.step))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(value)
        plain = (bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format)
        return (type(value), repr(value)) if isinstance(value, plain) else (id(value), object())


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return name.strip("_") if name.startswith("__") or not name.endswith("_") else name
