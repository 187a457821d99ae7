"""The KeyboardInterrupt of a run that was saved: a script ends by it as by any other (by SIGINT, for which shells have
130 and stop their loops), but with one line in place of a traceback."""

import contextlib
import logging
import sys
from collections.abc import Callable
from types import TracebackType

_MARK = "jaxtrain_saved_the_run"
_shown_before: list[Callable[..., None]] = []  # what shows all other exceptions, once `_show` stands before it


def marked(message: str) -> KeyboardInterrupt:
    """Return one that says `message`, of exactly this class: CPython ends a process by SIGINT for no subclass."""
    if not _shown_before:
        _shown_before.append(sys.excepthook)
        sys.excepthook = _show
    error = KeyboardInterrupt(message)
    setattr(error, _MARK, True)
    return error


def is_marked(error: BaseException) -> bool:
    """Tell whether `marked` made it."""
    return hasattr(error, _MARK)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not is_marked(error):
        _shown_before[0](kind, error, trace)
    elif not _logged():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no stream, or nobody to read it
            print(error, file=sys.stderr, flush=True)


def _logged() -> bool:
    """Tell whether the run's log has shown the line already: with run.quiet it goes to train.log alone."""
    handlers = logging.getLogger("jaxtrain").handlers
    return any(hasattr(handler, "stream") and handler.level <= logging.INFO for handler in handlers)
