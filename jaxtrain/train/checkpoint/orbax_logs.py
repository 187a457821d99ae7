"""Keep what orbax logs, through absl, out of a script's own logging."""

import logging
import pathlib

from absl import logging as absl_logging

_LOG = logging.getLogger("absl")


def leave_root_alone() -> None:
    """Log through absl without its logging.basicConfig, which it calls where the root logger has no handler: orbax logs
    a line as it is imported, and the script's own basicConfig would do nothing any more."""
    absl_logging.log = absl_logging.skip_log_prefix(_log)


def _log(level: int, message: str, *arguments, **options) -> None:
    _LOG.log(absl_logging.converter.absl_to_standard(level), message, *arguments, **options)


def is_news(record: logging.LogRecord) -> bool:
    """Filter absl's records: drop orbax's tracebacks of errors that its caller gets and reports too, and its dozens of
    lines of each save, unless absl.logging.set_verbosity asks for them."""
    if "orbax" not in pathlib.PurePath(record.pathname).parts:
        return True
    return not record.exc_info and (record.levelno >= logging.WARNING or _LOG.level != logging.NOTSET)
