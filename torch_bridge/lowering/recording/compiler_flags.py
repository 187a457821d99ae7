"""Tell the user's own code that no compiler is at work while a module is recorded, as torch would.

Libraries (transformers, torch itself) are told of the export, so that they leave out checks of values. User code is
told of it too if its branch without a compiler cannot be recorded.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from torch_bridge.lowering.python.names import of_library_file

_OLD_NAMES = ("torch._utils", "torch._dynamo.external_utils")  # modules that wrap the same function
_ASKED: list[str] = []  # lines of user code that have asked, in the current record


def user_asks() -> bool:
    """Return True if user code has called the caller of this, by any of its names; note the line."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") in _OLD_NAMES:
        frame = frame.f_back
    if of_library_file(frame.f_code.co_filename):
        return False
    _ASKED.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return True


def _is_compiling() -> bool:
    from torch_bridge.lowering.recording import compiler_flags  # the globals of this code are torch.compiler's

    told = torch.compiler._is_compiling_flag and not torch.jit.is_scripting()
    return told and not compiler_flags.user_asks()


def _is_exporting() -> bool:
    from torch_bridge.lowering.recording import compiler_flags

    return torch.compiler._is_exporting_flag and not compiler_flags.user_asks()


@contextlib.contextmanager
def unseen_by_users(unseen: bool) -> Iterator[list[str]]:
    """Hide the export from user code while active, if `unseen`. Yields the lines of user code that ask.

    The functions stay the same objects: user code may have imported them by name.
    """
    pairs = [(torch.compiler.is_compiling, _is_compiling), (torch.compiler.is_exporting, _is_exporting)]
    kept = [(function, function.__code__) for function, _ in pairs]
    _ASKED.clear()
    try:
        for function, other in pairs if unseen else ():
            function.__code__ = other.__code__
        yield _ASKED
    finally:
        for function, code in kept:
            function.__code__ = code
