"""Handle standard streams with care: some programs replace them by a logger, or have none."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any


def is_terminal(stream: Any) -> bool:
    """Return True if a stream is a terminal; False for None and for a stream without `isatty`."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return bool(stream.isatty())
    return False


def is_notebook() -> bool:
    """Return True in a Jupyter kernel: its page shows progress bars, though its streams are no terminals."""
    return hasattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel")


def take_any_text() -> None:
    """Make the standard streams escape characters that their encoding lacks, instead of raising (ASCII locale)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")


_LOST = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO}  # EIO: the terminal was closed


class _Unread:
    """Standard output that switches to /dev/null if its reader has ended, as with `| head -1`, or its disk is full.

    The command's work then continues.
    """

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
    """Keep prints in this context from failing because the reader of standard output has ended."""
    if sys.stdout is None:
        yield
        return
    with contextlib.redirect_stdout(_Unread(sys.stdout)):
        try:
            yield
        finally:
            sys.stdout.flush()
