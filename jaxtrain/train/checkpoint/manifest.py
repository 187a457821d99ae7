"""The seal of a checkpoint folder: `meta.json` with size and SHA-256 of every other file, and the hash of all that."""

import concurrent.futures
import hashlib
import json
import pathlib
from typing import Any

from jaxtrain.errors import UserError
from torch_bridge.atomic_file import replacing

NAME = "meta.json"
READERS = 4  # files hashed at a time


def write(folder: pathlib.Path, meta: dict[str, Any]) -> None:
    """Seal the files that are in `folder` now."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME]
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        digests = list(pool.map(_digest, paths))
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    _put(folder, {**meta, "files": files})


def renew(folder: pathlib.Path, meta: dict[str, Any]) -> bool:
    """Seal the files as they were sealed, with another `meta`; False where that is what it holds."""
    sealed = read(folder)
    content = {**meta, "files": sealed["files"]}
    if _hash_of(content) == _hash_of(sealed):
        return False
    _put(folder, content)
    return True


def _put(folder: pathlib.Path, content: dict[str, Any]) -> None:
    """Atomic, and on the disk when it returns."""
    with replacing(folder / NAME, durable=True) as aside:
        aside.write_text(json.dumps({**content, "seal": _hash_of(content)}))


def read(folder: pathlib.Path) -> dict[str, Any]:
    """The meta.json of a folder. Raises UserError where it is missing or not as it was written."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
        told = content.pop("seal")
        if told != _hash_of(content):
            raise ValueError("its content does not match its hash")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise UserError(f"{path}: damaged: {why}") from None
    return content


def problems(folder: pathlib.Path) -> list[str]:
    """What is not as it was written; empty where the folder is whole."""
    try:
        files = read(folder)["files"]
    except UserError as error:
        return [str(error)]
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda item: _problem(folder, *item), files.items())
    return [problem for problem in found if problem]


def _problem(folder: pathlib.Path, name: str, wanted: dict[str, Any]) -> str:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{name}: lies outside the checkpoint"
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"{name}: {size:,} bytes, wanted {wanted['bytes']:,}"
        return "" if _digest(path) == wanted["sha256"] else f"{name}: its content has changed"
    except OSError as error:
        return f"{name}: {error.strerror}"


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(content: dict[str, Any]) -> str:
    read_back = json.loads(json.dumps(content))  # so that keys sort as they do after reading
    return hashlib.sha256(json.dumps(read_back, sort_keys=True).encode()).hexdigest()
