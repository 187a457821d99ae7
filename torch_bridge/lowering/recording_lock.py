"""Let one thread record at a time: recording replaces functions of torch and Python for the whole process."""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

RECORDING_LOCK = threading.RLock()


@contextlib.contextmanager
def quiet(keep: Callable | None = None) -> Iterator[None]:
    """Silence warnings, torch's logs and what this thread prints: recorded code runs several times. A problem that the
    user can fix is raised as UnsupportedModel. keep: receives the warnings, in place of warnings.showwarning."""
    named = [x for name, x in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch"]
    torchs = [x for x in named if isinstance(x, logging.Logger) and x.level and x.name != "torch.__trace"]
    torchs.append(logging.getLogger("torch"))  # without __trace, which draft_export reads
    levels = [logger.level for logger in torchs]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(_Muted(sys.stderr)),
        contextlib.redirect_stdout(_Muted(sys.stdout)),
    ):
        warnings.simplefilter("ignore" if keep is None else "always")
        if keep is not None:
            warnings.showwarning = keep
        for logger in torchs:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(torchs, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """Disable all logging: torch's draft export reads its own log, and would report what it finds there."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)


class _Muted(io.TextIOBase):
    """Stream that drops what the thread that made it writes; other threads write as usual."""

    def __init__(self, stream: Any):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
