"""Failed saves: their reason in short, and when to retry."""

import errno
import os
import time

FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
LASTING = ("TypeError:", "ValueError:", "KeyError:", "AttributeError:", "NotImplementedError:")
KNOWN_REASONS = [
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.ENOTDIR)
]


class SaveFailures:
    """The failed saves since the last good one.

    count: how many in a row. retry_at: time of the next retry on the monotonic clock; infinite if none failed.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset after a save was committed."""
        self.count, self.retry_at = 0, float("inf")

    def note(self) -> float:
        """Count one more failure; return the seconds until the next retry, which double each time up to a limit."""
        self.count += 1
        pause = min(FIRST_RETRY_S * 2 ** (self.count - 1), LONGEST_RETRY_S)
        self.retry_at = time.monotonic() + pause
        return pause

    def shorten(self) -> None:
        """Make the next pause short again."""
        self.count = min(self.count, 1)

    @property
    def due(self) -> bool:
        """Return True if a retry is due."""
        return time.monotonic() >= self.retry_at

    @property
    def pause_s(self) -> float:
        """Return the seconds until the next retry."""
        return max(0.0, self.retry_at - time.monotonic())


def is_lasting(reason: str) -> bool:
    """Return True for an error caused by the state itself, not by the disk or the software that writes to it."""
    return reason.startswith(LASTING) and "tensorstore/" not in reason


def reason_of(error: BaseException) -> str:
    """Return the reason of an error: the operating system's message if tensorstore's, orbax's or fsspec's long message
    contains one, else the class and the first 300 characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    if "NOT_FOUND:" in text:  # tensorstore's message for a folder that was deleted or moved away
        return os.strerror(errno.ENOENT)
    for known in KNOWN_REASONS:
        if known.lower() in text.lower():
            return known
    return f"{type(error).__name__}: {text[:300]}"
