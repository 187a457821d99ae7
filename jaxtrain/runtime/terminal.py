"""Tell what the standard streams can do: some programs replace them by a logger, or have none."""

import contextlib
import os
import sys
from collections.abc import Iterator
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


class _Unread:
    """The standard output of a command whose work goes on when nobody reads on, as behind `| head -1`: it is then
    directed to nowhere."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Any) -> None:
        try:
            action()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()


@contextlib.contextmanager
def outliving_its_reader() -> Iterator[None]:
    """Have nothing that is printed within fail because its reader has ended."""
    if sys.stdout is None:
        yield
        return
    with contextlib.redirect_stdout(_Unread(sys.stdout)):
        try:
            yield
        finally:
            sys.stdout.flush()
