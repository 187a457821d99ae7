"""Tell what the standard streams can do: some programs replace them by a logger, or have none."""

import contextlib
import errno
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


_LOST = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO}  # EIO: of a terminal that was closed


class _Unread:
    """The standard output of a command whose work goes on when nobody reads on, as behind `| head -1`, or when the disk
    behind it is full: it is then directed to nowhere."""

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
        except OSError as error:
            if error.errno not in _LOST:
                raise
            if error.errno != errno.EPIPE and sys.stderr is not None:
                with contextlib.suppress(OSError):
                    print(f"standard output: {error.strerror}; the run goes on without it", file=sys.stderr)
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
