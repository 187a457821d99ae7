"""Keep the warnings that user code gives while it is recorded, to show them once when the record is made."""

import itertools
import re
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_bridge.lowering.errors import MACHINERY

# Parts of torch that record: what they warn of themselves concerns no user.
_RECORDS = (
    "_dynamo/ _export/ _functorch/ _subclasses/ _inductor/ _higher_order_ops/ _logging/ fx/ export/ utils/_".split()
)
_GIVE = tuple(
    f"/{name}.py" for name in "warnings typing_extensions functools contextlib copy copyreg".split()
)  # on behalf of their callers
_EXPORT = "torch_bridge/lowering/recording/export.py"  # which calls what is recorded
_SYMBOL = re.compile(r"\b[su]\d+\b")


class _Kept(NamedTuple):
    text: str
    category: type[Warning]
    file: str
    line: int
    module: str
    registry: dict


class UserWarnings:
    """Warnings of one record. Sizes that are symbols in it are shown as the numbers of the present batch."""

    def __init__(self) -> None:
        self._kept: dict[tuple, _Kept] = {}

    def keep(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        """Keep a warning if user code has called what gives it. Replaces warnings.showwarning."""
        frames = [frame for frame in _frames(sys._getframe(1)) if not frame.f_code.co_filename.endswith(_GIVE)]
        files = [frame.f_code.co_filename.replace("\\", "/") for frame in frames]
        if not files or any(f"/torch/{part}" in files[0] for part in _RECORDS) or "torch_bridge/" in files[0]:
            return
        called = itertools.takewhile(lambda place: not files[place].endswith(_EXPORT), range(len(files)))
        users = (frames[place] for place in called if not any(part in files[place] for part in MACHINERY))
        frame = next(users, None)
        if frame is None and "/torch/nn/" not in files[0]:  # nothing of the user's is being called
            return
        if frame is None:  # torch's own layer or loss, without a line of the user's: the one that has led to the record
            frame = next((frame for frame, file in zip(frames, files, strict=True) if _is_users(file)), frames[0])
        text, names = _with_sizes(str(message)), frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        kept = _Kept(text, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__", ""), registry)
        self._kept.setdefault(kept[:4], kept)

    def show(self, shown: set) -> None:
        """Show what the user's filters let through, except what `shown` holds, which receives all of it."""
        for key, kept in self._kept.items():
            if key not in shown:
                shown.add(key)
                warnings.warn_explicit(*kept[:4], module=kept.module, registry=kept.registry)


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield the frame and those that call it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    return not any(part in file for part in (*MACHINERY, "/jaxtrain/", "<frozen "))


def _with_sizes(text: str) -> str:
    """Replace the names of symbolic sizes by their present numbers."""
    mode = torch._guards.detect_fake_mode()
    sizes = getattr(getattr(mode, "shape_env", None), "backed_var_to_val", None) or {}
    numbers = {str(symbol): str(number) for symbol, number in sizes.items()}
    return _SYMBOL.sub(lambda name: numbers.get(name[0], name[0]), text)
