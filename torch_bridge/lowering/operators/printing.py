"""Record print() inside a forward pass: it prints at every call of the compiled program, as it does in torch.

While the module is recorded, a tensor in an f-string or in str() becomes a mark; print() finds the marks, and the
tensors among its arguments, and records an operator with all of them and the text around them.
"""

import builtins
import re
import sys
from typing import Any

import jax
import numpy as np
import torch
from torch import library

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_torch
from torch_bridge.lowering.table import lowering

library.define("torch_bridge::print", "(Tensor[] values, str[] pieces, str[] formats, bool errors) -> Tensor")


@library.register_fake("torch_bridge::print")
def _print(values, pieces, formats, errors):
    return values[0].new_empty(0)


torch.fx.node.has_side_effect(torch.ops.torch_bridge.print.default)  # nothing uses its result
_MARK = re.compile("<tensor ([0-9]+) of the forward pass>")


WHOLE = "!r"  # in place of a format specification: the text of print(tensor)


class Prints:
    """Prints of one record. The tensors are kept as long as it lives."""

    def __init__(self):
        self._shown: list[tuple[torch.Tensor, str]] = []

    def mark(self, tensor: torch.Tensor, how: str) -> str:
        """Return a mark that stands for the text of a tensor. how: a format specification, or WHOLE."""
        self._shown.append((tensor, how))
        return f"<tensor {len(self._shown) - 1} of the forward pass>"

    def print(
        self, *arguments: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: Any = False
    ):
        """Replace builtins.print."""
        if file is not None and file not in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
            return builtins_print(*arguments, sep=sep, end=end, file=file)
        texts = [self.mark(one, WHOLE) if isinstance(one, torch.Tensor) else str(one) for one in arguments]
        text = (" " if sep is None else sep).join(texts) + ("\n" if end is None else end)
        pieces = _MARK.split(text)  # text, number, text, number, ..., text
        found = [self._shown[int(number)] for number in pieces[1::2]]
        values = [tensor.detach() for tensor, _ in found] or [torch.zeros(())]
        errors = file is not None and file in (sys.stderr, sys.__stderr__)
        torch.ops.torch_bridge.print(values, pieces[::2], [how for _, how in found], errors)
        return None


builtins_print = builtins.print


def check_text(text: Any) -> None:
    """Raise UserError for a text with a tensor's mark that is not printed, such as a name or a file's path."""
    if isinstance(text, str) and _MARK.search(text):
        raise UserError(f"the text {text!r} holds a value that a compiled step does not know when it is recorded")


@lowering("torch_bridge.print.default")
def _show(call, values, pieces, formats, errors):
    """Print on the host, once per call, as soon as the values are computed."""

    def show(*arrays):
        text = pieces[0]
        for array, how, after in zip(arrays, formats, pieces[1:], strict=False):
            text += _text(array, how) + after
        builtins_print(text, end="", file=sys.stderr if errors else sys.stdout, flush=True)

    jax.debug.callback(show, *values)
    return jax.numpy.zeros(0, values[0].dtype)


def _text(array: Any, how: str) -> str:
    tensor = to_torch(np.asarray(array))
    tensor = tensor.long() if tensor.dtype == torch.int32 else tensor
    return repr(tensor) if how == WHOLE else format(tensor, how)
