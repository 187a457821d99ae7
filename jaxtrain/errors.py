"""Exceptions whose message is all that the user needs, and helpers that shorten other libraries' messages."""

import contextlib
import errno
import io
import os
import pathlib
import traceback
from collections.abc import Iterator

_TO_DO = {
    errno.ENOSPC: "make room there, or write to another disk",
    errno.EDQUOT: "your quota there is used up: delete something, or write to another disk",
    errno.EFBIG: "the file system or `ulimit -f` allows no larger file: write to another disk",
    errno.EROFS: "it can only be read: choose a place on another disk",
    errno.EACCES: "give yourself the right to it (ls -ld shows whose it is), or choose another place",
    errno.EPERM: "give yourself the right to it (ls -ld shows whose it is), or choose another place",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file: check it",
    errno.EISDIR: "give the path of a file",
    errno.EEXIST: "remove it, or choose another place",
    errno.ENOTEMPTY: "remove what is in it, or choose another place",
    errno.ELOOP: "its links lead in a circle: give the path of the file itself",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n 65536) and start again",
    errno.ENFILE: "the machine has too many files open: close some, and start again",
    errno.ENOMEM: "the machine is out of memory: end other programs, or take a smaller batch",
    errno.ENOLCK: "files cannot be locked there, as on some network file systems: choose a folder on a local disk",
    errno.EOPNOTSUPP: "its file system cannot do that: choose a folder on a local disk",
    errno.ENOSYS: "its file system cannot do that: choose a folder on a local disk",
    errno.EIO: "the disk or the network failed: look at the machine's log (dmesg), and start again",
    errno.ESTALE: "the network file system has lost it: mount it again, and start again",
    errno.ETIMEDOUT: "the network file system does not answer: look at its server, and start again",
    errno.EBUSY: "another program uses it: end that, or choose another place",
    errno.ETXTBSY: "another program runs it: end that, or choose another place",
}


class UserError(ValueError):
    """A mistake in a config, a file or a command line.

    Commands print its message without a traceback and exit with `exit_code`. The message says what is wrong and where,
    what was found and wanted, and what to do next.
    """

    exit_code = 2


class NoCounterpart(UserError):
    """An optimizer without a counterpart in JAX; torch itself can run it."""


class LateEdit(UserError):
    """A constant of a compiled step was changed some steps ago, so steps have run with its old value."""


class DataError(UserError):
    """Reading the data failed during the run: a sample raised, or a worker process died or hangs."""

    exit_code = 1


def install(extra: str) -> str:
    """Return the command that installs an extra. It names this clone: jaxtrain is not on a package index yet."""
    clone = pathlib.Path(__file__).parents[1]
    return f"pip install -e '{clone if (clone / 'pyproject.toml').is_file() else '.'}[{extra}]'"


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of at most 400 characters, or its class name if the message is empty."""
    return shortened(" ".join(str(error).split()), 400) or type(error).__name__


def shortened(text: object, most: int = 120) -> str:
    """Return the text, or its first `most` characters and its full length if it is longer."""
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def reason(error: BaseException) -> str:
    """Return any error on one line: one of the file system as `file_sentence` has it, a database's by what its driver
    said, one of ours by its text, another with its class."""
    if isinstance(error, OSError) and error.errno is not None:
        return file_sentence(error)
    for one in (error, error.__cause__, error.__context__):
        if isinstance(driver := getattr(one, "orig", None), Exception):  # of an error of SQLAlchemy's
            return one_line(driver)
    return one_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"


def file_sentence(error: OSError, path: str | os.PathLike | None = None) -> str:
    """Return an error of the file system as one sentence: which path, what the system said, and what to do. path: named
    in place of the error's own. One that names no file gets the innermost file or path that the failing code had in
    hand."""
    given = (error.filename, error.filename2) if error.filename is not None else (_in_hand(error),)
    named = [os.fsdecode(name) for name in given if isinstance(name, str | bytes | os.PathLike)]
    named = named if path is None else [os.fspath(path)]
    said = error.strerror or one_line(error)
    number = errno.ENOSPC if error.errno is None and "requested and" in said else error.errno  # numpy's, of a full disk
    to_do = _TO_DO.get(number or 0)
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if full and named and named[0].startswith(os.path.join(os.environ.get("TMPDIR") or "/tmp", "")):
        to_do = "make room there, or name another folder for temporary files in TMPDIR"
    return ": ".join([*([" -> ".join(named)] if named else []), f"{said}; {to_do}" if to_do else said])


def _in_hand(error: OSError) -> str | None:
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        held = [value for value in frame.f_locals.values() if isinstance(value, pathlib.Path | io.IOBase)]
        names = [getattr(value, "name", None) if isinstance(value, io.IOBase) else str(value) for value in held]
        if named := [name for name in names if isinstance(name, str) and not name.startswith("<")]:  # <stdout>
            return named[-1]
    return None


@contextlib.contextmanager
def at(path: str | os.PathLike) -> Iterator[None]:
    """Inside the context, an OSError that names no file gets this path: the system names none when it writes, locks or
    maps an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # else its text is its own
            error.filename = os.fspath(path)
        raise
