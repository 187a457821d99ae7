"""The KeyboardInterrupt of a run that was saved.

It ends a script like any other KeyboardInterrupt (by SIGINT, so that shells report 130 and stop their loops), but
prints one line instead of a traceback.
"""

import contextlib
import logging
import sys
from collections.abc import Callable
from types import TracebackType

_MARK = "jaxtrain_saved_the_run"
_shown_before: list[Callable[..., None]] = []  # the previous sys.excepthook, once `_show` is installed


def marked(message: str) -> KeyboardInterrupt:
    """Return a marked KeyboardInterrupt with a message. It is no subclass: for those CPython doesn't exit by SIGINT."""
    if not _shown_before:
        _shown_before.append(sys.excepthook)
        sys.excepthook = _show
    error = KeyboardInterrupt(message)
    setattr(error, _MARK, True)
    return error


def is_marked(error: BaseException) -> bool:
    """Return True if the exception was made by `marked`."""
    return hasattr(error, _MARK)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not is_marked(error):
        _shown_before[0](kind, error, trace)
    elif not _logged():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be missing or closed
            print(error, file=sys.stderr, flush=True)


def _logged() -> bool:
    """Return True if the run's log has shown the line already; with run.quiet it goes to train.log only."""
    handlers = logging.getLogger("jaxtrain").handlers
    return any(hasattr(handler, "stream") and handler.level <= logging.INFO for handler in handlers)
