"""Write a file or folder beside its place and move it there when complete, so that nobody finds a half of it."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: pathlib.Path, shared: bool = False, durable: bool = False) -> Iterator[pathlib.Path]:
    """Yield a path to write to; afterwards it becomes `path`. An error deletes it and leaves `path` as it was.

    What stands beside its place is removed first, never written through: in a folder from elsewhere it may be a link.
    Folders that `path` lies in are made. shared: other processes may write the same file at the same time. durable: the
    file is on the disk, not only in the system's memory, when it gets its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f".{os.getpid()}" if shared else ""
    aside = path.with_name(f".{path.name}{own}.part")  # hidden from a search for names that begin like it
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)
    try:
        yield aside
        if durable:
            with aside.open("rb") as file:
                os.fsync(file.fileno())
        if aside.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
        raise
