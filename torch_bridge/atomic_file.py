"""Write a file or folder to a temporary path and rename it when complete, so that no reader sees a partial one."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from jaxtrain.errors import at


@contextlib.contextmanager
def replacing(path: pathlib.Path, shared: bool = False, durable: bool = False) -> Iterator[pathlib.Path]:
    """Yield a temporary path to write to and rename it to `path` afterwards. On an error, delete it and keep `path`.

    Anything already at the temporary path is removed first, never written through: in a folder from elsewhere it may be
    a link. Parent folders of `path` are created. shared: other processes may write the same file at the same time.
    durable: sync the file to disk before it is renamed. An OSError names the file.
    """
    with at(path), _replacing(path, shared, durable) as aside:
        yield aside


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file as UTF-8, whole or not at all; through a link, a pipe or a device, as /dev/stdout, directly.

    Raises OSError, which names the file.
    """
    path = pathlib.Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with at(path):
            path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _replacing(path: pathlib.Path, shared: bool, durable: bool) -> Iterator[pathlib.Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f".{os.getpid()}" if shared else ""
    aside = path.with_name(f".{path.name}{own}.part")  # hidden from searches for names that start like it
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
