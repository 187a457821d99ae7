"""Saves that fail: why, in words, and when to try again."""

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

    count: how many in a row. retry_at: on the monotonic clock, when the next is due; infinite where none failed.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again: a save was committed."""
        self.count, self.retry_at = 0, float("inf")

    def note(self) -> float:
        """Count one more; return the seconds until the next try, twice as long each time."""
        self.count += 1
        pause = min(FIRST_RETRY_S * 2 ** (self.count - 1), LONGEST_RETRY_S)
        self.retry_at = time.monotonic() + pause
        return pause

    def shorten(self) -> None:
        """Let the next pause be a short one again, however long they had become."""
        self.count = min(self.count, 1)

    @property
    def due(self) -> bool:
        """Return True where the next try's time has come."""
        return time.monotonic() >= self.retry_at

    @property
    def pause_s(self) -> float:
        """Return how long it is until then."""
        return max(0.0, self.retry_at - time.monotonic())


def is_lasting(reason: str) -> bool:
    """Return True for an error of the state itself, not of the disk or of what writes to it."""
    return reason.startswith(LASTING) and "tensorstore/" not in reason


def reason_of(error: BaseException) -> str:
    """The operating system's word where there is one in tensorstore's, orbax's or fsspec's long message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    if "NOT_FOUND:" in text:  # tensorstore's word for a folder that was deleted or moved away
        return os.strerror(errno.ENOENT)
    for known in KNOWN_REASONS:
        if known.lower() in text.lower():
            return known
    return f"{type(error).__name__}: {text[:300]}"
