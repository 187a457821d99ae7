"""A file that a run keeps open. The user's code may close its descriptor, as scripts do that turn into a daemon, and
the number may be another file's since: that one is never written to."""

import contextlib
import errno
import os
import pathlib

from jaxtrain.runtime import plain_files


class KeptFile:
    """Raises OSError where the file cannot be opened."""

    def __init__(self, path: pathlib.Path, flags: int):
        self.path, self._flags = path.absolute(), flags  # wherever the process goes
        self._open()

    def _open(self) -> None:
        self._number = plain_files.open_plain(self.path, self._flags)
        self._file = self._place()

    def _place(self) -> tuple[int, int] | None:
        """Return what the number stands for now."""
        try:
            told = os.fstat(self._number)
        except OSError:
            return None
        return told.st_dev, told.st_ino

    @property
    def lost(self) -> bool:
        """Return True if the descriptor is no longer this file's."""
        return self._place() != self._file

    def descriptor(self) -> int:
        """Return an open one, the file opened anew where it was lost. Raises OSError, also once it was closed."""
        if self._number < 0:
            raise OSError(errno.EBADF, "it was closed", str(self.path))
        if self.lost:
            self._open()
        return self._number

    def close(self) -> None:
        if self._number >= 0 and not self.lost:
            with contextlib.suppress(OSError):
                os.close(self._number)
        self._number = -1
