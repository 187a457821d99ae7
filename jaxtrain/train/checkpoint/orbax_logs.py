"""Keep orbax's log lines, which it writes through absl, from disturbing a script's own logging."""

import logging
import pathlib

from absl import logging as absl_logging

_LOG = logging.getLogger("absl")


def leave_root_alone() -> None:
    """Make absl log without calling logging.basicConfig, which it does if the root logger has no handler. orbax logs a
    line when it is imported, and after that the script's own basicConfig would have no effect."""
    absl_logging.log = absl_logging.skip_log_prefix(_log)


def _log(level: int, message: str, *arguments, **options) -> None:
    _LOG.log(absl_logging.converter.absl_to_standard(level), message, *arguments, **options)


def is_news(record: logging.LogRecord) -> bool:
    """Filter absl's records: drop orbax's tracebacks of errors, which the caller receives and reports anyway, and its
    dozens of lines per save, unless absl.logging.set_verbosity asks for them."""
    if "orbax" not in pathlib.PurePath(record.pathname).parts:
        return True
    return not record.exc_info and (record.levelno >= logging.WARNING or _LOG.level != logging.NOTSET)
