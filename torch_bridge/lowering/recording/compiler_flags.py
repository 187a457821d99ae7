"""While a module is recorded, the user's own code is told what torch tells it: that no compiler is at work.

Libraries (transformers, torch itself) are told of the export, where they leave out looks at values.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from torch_bridge.lowering.python.names import of_library_file

_OLD_NAMES = ("torch._utils", "torch._dynamo.external_utils")  # of the same function, which they call


def asked_by_user() -> bool:
    """Return True if the user's own code has called the caller of this, by whichever name of it."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") in _OLD_NAMES:
        frame = frame.f_back
    return not of_library_file(frame.f_code.co_filename)


def _is_compiling() -> bool:
    from torch_bridge.lowering import compiler_flags  # the globals of this code are torch.compiler's

    told = torch.compiler._is_compiling_flag and not torch.jit.is_scripting()
    return told and not compiler_flags.asked_by_user()


def _is_exporting() -> bool:
    from torch_bridge.lowering.recording import compiler_flags

    return torch.compiler._is_exporting_flag and not compiler_flags.asked_by_user()


@contextlib.contextmanager
def unseen_by_users() -> Iterator[None]:
    """Around a record. The functions stay the same objects: user's code may have imported them by name."""
    pairs = [(torch.compiler.is_compiling, _is_compiling), (torch.compiler.is_exporting, _is_exporting)]
    kept = [(function, function.__code__) for function, _ in pairs]
    try:
        for function, other in pairs:
            function.__code__ = other.__code__
        yield
    finally:
        for function, code in kept:
            function.__code__ = code
