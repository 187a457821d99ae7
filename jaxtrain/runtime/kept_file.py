"""A file that a run keeps open, safe against code that closes its descriptor.

User code may close the descriptor, as scripts do that become a daemon. Its number may then belong to another file, and
that file must never be written to.
"""

import contextlib
import errno
import os
import pathlib

from jaxtrain.runtime import plain_files


class KeptFile:
    """An open file that is reopened if its descriptor was closed. Raises OSError if the file cannot be opened."""

    def __init__(self, path: pathlib.Path, flags: int):
        self.path, self._flags = path.absolute(), flags  # absolute: the process may change its directory
        self._open()

    def _open(self) -> None:
        self._number = plain_files.open_plain(self.path, self._flags)
        self._file = self._place()

    def _place(self) -> tuple[int, int] | None:
        """Return (device, inode) of the file that the descriptor now refers to, None if it is closed."""
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
        """Return an open descriptor; reopen the file if its descriptor was lost. Raises OSError, also after `close`."""
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
