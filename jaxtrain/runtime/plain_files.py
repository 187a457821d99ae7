"""Write only inside a run folder. In a folder from elsewhere, any name may be a link to one of the user's own files."""

import errno
import os
import pathlib
import shutil
import stat

from jaxtrain.errors import UserError

FOLDERS = ("checkpoints", "exports", "reports", "tensorboard", "mlflow_artifacts", "wandb")  # that a run writes into
LINES = ("run.lock", "train.log", "metrics.jsonl", "mlflow.db", "mlflow_run.txt", "report.html")  # files it writes
NAMED = ("exports", "reports")  # folders in which commands write files by name


def open_plain(path: str | os.PathLike, flags: int) -> int:
    """Open (or create) a plain file like os.open, never following a link. Also usable as the `opener` of `open`.

    Raises OSError, also if the path is no plain file.
    """
    extra = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # nonblocking: a pipe without a reader would hang
    descriptor = os.open(path, flags | extra, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return descriptor


def refuse_links(folder: pathlib.Path) -> None:
    """Raise UserError if a name that a run or one of its commands writes to is a link, a pipe or a device."""
    for name in (*FOLDERS, *LINES):
        path = folder / name
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        wanted = stat.S_ISDIR if name in FOLDERS else stat.S_ISREG
        if wanted(mode):
            continue
        what = f"a link to {os.readlink(path)}" if stat.S_ISLNK(mode) else "a file" if stat.S_ISREG(mode) else "none"
        kind = "folder" if name in FOLDERS else "plain file"
        raise UserError(
            f"run.dir: {path}: wanted a {kind}, found {what}; a run writes within its folder only. Move it away, or "
            "choose another run.dir"
        )
    for name in NAMED:
        for place, folders, files in os.walk(folder / name):
            for path in (pathlib.Path(place, inner) for inner in (*folders, *files)):
                if path.is_symlink():
                    raise UserError(
                        f"{path}: is a link to {os.readlink(path)}; a run writes within its folder only. Move it away"
                    )


def delete(path: pathlib.Path) -> None:
    """Delete a file or a folder, ignoring errors inside the folder. For a link, delete only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
