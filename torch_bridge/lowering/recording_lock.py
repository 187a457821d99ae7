"""Let one thread capture at a time, and silence code that runs on this library's own account."""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

RECORDING_LOCK = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, torch's logs and what this thread prints: code that runs on this library's own account."""
    named = [x for name, x in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch"]
    torchs = [x for x in named if isinstance(x, logging.Logger) and x.level]
    torchs.append(logging.getLogger("torch"))
    levels = [logger.level for logger in torchs]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(_Muted(sys.stderr)),
        contextlib.redirect_stdout(_Muted(sys.stdout)),
    ):
        warnings.simplefilter("ignore")
        for logger in torchs:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(torchs, levels, strict=True):
                logger.setLevel(level)


class _Muted(io.TextIOBase):
    """Stream that drops what the thread that made it writes; other threads write as usual."""

    def __init__(self, stream: Any):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
