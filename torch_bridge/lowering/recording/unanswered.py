"""Values that Python reads and a record cannot tell. The error ends the record, unless the module's code catches it."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from torch_bridge.lowering.errors import Unanswerable

READS = (torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__)
ASKED = (*READS, torch.Tensor.item, torch.Tensor.tolist)
_ARRAYS = (torch.Tensor.__array__, torch.Tensor.numpy)
_OF_TORCH = (RuntimeError, ValueError, TypeError, IndexError)  # raised by torch too: a tensor of several numbers
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = ("__bool__", "__int__", "__float__", "__index__")
_refusals: list[str] = []  # in the present record


def refuse(reason: str) -> NoReturn:
    """Raise Unanswerable for what a record cannot answer, and keep the reason: the code may catch the error."""
    _refusals.append(reason)
    raise Unanswerable(reason)


class Unanswered:
    """Errors of such reads in one record."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        _refusals.clear()

    def note(self, function: Any, error: Exception) -> None:
        """Note an error that a function of torch has raised, if it reads a value."""
        if function in _ARRAYS or (function in ASKED and type(error) not in _OF_TORCH):
            self._errors.append(_first_line(error))

    def reads(self) -> Iterator[tuple[type, str, Callable]]:
        """Yield (class, method name, method) for reads of sizes and numbers that depend on values, which note."""
        for kind in _SYMBOLS:
            for name in _NUMBERS:
                if name in vars(kind):
                    yield kind, name, self._noting(vars(kind)[name])

    def _noting(self, read: Callable) -> Callable:
        def noting(symbol: Any) -> Any:
            try:
                return read(symbol)
            except Exception as error:
                if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
                    self._errors.append(_first_line(error))
                raise

        return noting

    def check(self) -> None:
        """Raise Unanswerable if the code has caught such an error. To be called at the end of a record."""
        if _refusals:
            raise Unanswerable(_refusals[0])
        if self._errors:
            raise Unanswerable(f"the code catches the error of what a record cannot tell: {self._errors[0]}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
