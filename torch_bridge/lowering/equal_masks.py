"""Recognise masks that are computed twice: `out[y > 0]` and `target[y > 0]` select the same number of rows.

Torch gives every mask a length of its own. While code is captured, an earlier mask that was computed from the same
tensors by the same functions replaces a later one wherever it selects.
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
    """Masks of one capture, and how each was computed."""

    def __init__(self):
        self._numbers: dict[tuple, int] = {}  # of each computation of a tensor
        self._made: dict[int, tuple[torch.Tensor, int, int | None]] = {}  # a tensor, its version, its computation
        self._first: dict[int, torch.Tensor] = {}  # by computation

    def note(self, function: Any, args: tuple, kwargs: Mapping[str, Any], result: Any) -> None:
        """Remember how a function's result was computed."""
        name = _name(function)
        if name in _PURE and isinstance(result, torch.Tensor) and not any(result is given for given in args):
            made_of = (name, self._key(args), self._key(kwargs))
            what = self._numbers.setdefault(made_of, len(self._numbers))
            self._made[id(result)] = (result, result._version, what)
            if result.dtype == torch.bool:
                self._first.setdefault(what, result)

    def joined(self, function: Any, args: tuple) -> tuple:
        """Return the arguments of a function that selects, with earlier masks in place of equal ones."""
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
        """Return the number of the tensor's computation; its id and version if unknown or if it was written to."""
        held, version, what = self._made.get(id(tensor), (None, None, None))
        if held is not tensor:
            self._made[id(tensor)] = (tensor, tensor._version, None)  # kept alive, so that its id stays unique
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
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return name.strip("_") if name.startswith("__") or not name.endswith("_") else name
