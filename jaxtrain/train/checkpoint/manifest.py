"""Seal a checkpoint folder: `meta.json` holds size and SHA-256 of every other file, and a hash of its own content."""

import concurrent.futures
import errno
import hashlib
import json
import pathlib
import stat
from typing import Any

from jaxtrain import strict_json
from jaxtrain.errors import UserError
from torch_bridge.atomic_file import replacing

NAME = "meta.json"
READERS = 4  # files hashed in parallel


def write(folder: pathlib.Path, meta: dict[str, Any]) -> None:
    """Write meta.json with the hashes of all files now in `folder`."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME]
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        digests = list(pool.map(_digest, paths))
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    _put(folder, {**meta, "files": files})


def renew(folder: pathlib.Path, meta: dict[str, Any]) -> bool:
    """Replace `meta` in meta.json and keep the files' hashes; return False if nothing has changed."""
    sealed = read(folder)
    content = {**meta, "files": sealed["files"]}
    if _hash_of(content) == _hash_of(sealed):
        return False
    _put(folder, content)
    return True


def _put(folder: pathlib.Path, content: dict[str, Any]) -> None:
    """Write meta.json atomically and durably."""
    with replacing(folder / NAME, durable=True) as aside:
        aside.write_text(strict_json.dumps_whole({**content, "seal": _hash_of(content)}))


class Unreadable(UserError):
    """The system does not let this user, or this machine, read a file, so it is unknown if the file is intact."""


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Return the content of a folder's meta.json. Raises UserError if it is missing or damaged, and Unreadable."""
    path = folder / NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        _refuse_unreadable(path, error)
        raise UserError(f"{path}: damaged: {error.strerror or error}") from None
    return parse(content, path)


def parse(text: bytes, where: str | pathlib.Path) -> dict[str, Any]:
    """Parse the content of a meta.json. where: its path, for messages. Raises UserError if it is damaged."""
    try:
        content = strict_json.loads_whole(text)
        told = content.pop("seal")
        if told != _hash_of(content):
            raise ValueError("its content does not match its hash")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: damaged: {error}") from None
    return content


def names(content: dict[str, Any]) -> list[str]:
    """Return the sealed files, relative to their folder. Raises UserError for a path that leads out of it."""
    found = list(content.get("files", {}))
    for name in found:
        path = pathlib.PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name == NAME:
            raise UserError(f"{name}: lies outside the checkpoint")
    return found


def run_of(folder: pathlib.Path) -> str | None:
    """Return the identity in a run folder's fingerprint.json; None if it cannot be read."""
    try:
        found = strict_json.loads((folder / "fingerprint.json").read_bytes())["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # written by an older version; a damaged file is reported when the run resumes
    return found if isinstance(found, str) else None


def _refuse_unreadable(path: pathlib.Path, error: OSError) -> None:
    """Raise Unreadable, except if the file is missing or not a regular file."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        raise Unreadable(
            f"{path}: cannot be read: {error.strerror or error}. It is left as it is; give this user its permissions "
            "back, or wait for its disk, and start the same command again"
        ) from None


def problems(folder: pathlib.Path, step: int | None = None, run: str | None = None) -> list[str]:
    """List the files that differ from what was written; empty for an intact folder. step, run: those it should hold.

    Raises Unreadable.
    """
    try:
        content = read(folder)
        files = content["files"]
        if not isinstance(files, dict) or not all(isinstance(wanted, dict) for wanted in files.values()):
            raise UserError(f"{folder / NAME}: damaged: it lists no files")
    except Unreadable:
        raise
    except KeyError as error:
        return [f"{folder / NAME}: damaged: no {error}"]
    except UserError as error:
        return [str(error)]
    if step is not None and content.get("step", step) != step:
        return [f"it holds step {content.get('step')}: another checkpoint's folder, copied or renamed"]
    if run is not None and content.get("run", run) != run:
        return ["it is another run's checkpoint"]
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda item: _problem(folder, *item), files.items())
    return [problem for problem in found if problem]


def _problem(folder: pathlib.Path, name: str, wanted: dict[str, Any]) -> str:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{name}: lies outside the checkpoint"
    try:
        told = path.stat()
        if not stat.S_ISREG(told.st_mode):
            return f"{name}: no plain file"
        if told.st_size != wanted.get("bytes"):
            return f"{name}: {told.st_size:,} bytes, wanted {wanted.get('bytes'):,}"
        return "" if _digest(path) == wanted.get("sha256") else f"{name}: its content has changed"
    except OSError as error:
        _refuse_unreadable(path, error)
        return f"{name}: {error.strerror}"


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(content: dict[str, Any]) -> str:
    read_back = json.loads(json.dumps(content))  # so that keys sort as after reading
    return hashlib.sha256(json.dumps(read_back, sort_keys=True).encode()).hexdigest()
