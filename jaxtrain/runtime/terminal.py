"""Tell what the standard streams can do: some programs replace them by a logger, or have none."""

import contextlib
import sys
from typing import Any


def is_terminal(stream: Any) -> bool:
    """Tell whether a person looks at a stream; False for None and for one without `isatty`."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return bool(stream.isatty())
    return False


def take_any_text() -> None:
    """Let the standard streams write what their encoding lacks as escapes, where an ASCII locale would raise."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")
