"""Cache of prepared arrays on disk; each folder's name holds the hash of everything it was made from."""

import contextlib
import fcntl
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxtrain.errors import at
from torch_bridge.atomic_file import replacing

KEY_FILE = "key.json"


class Cache:
    """Folders `<stage>-<hash of key>`: a changed input file or setting leads to another folder, never to a stale one.

    A stage is written under a temporary name and renamed when complete, so an interrupted preparation resumes with the
    first missing stage. Processes that prepare at the same time wait for each other.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root

    def build(self, stage: str, key: dict[str, Any], make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        """Return the stage's folder; `make` fills it if it does not exist yet."""
        folder = self.folder(stage, key)
        if (folder / KEY_FILE).exists():
            return folder
        with self._locked():
            if (folder / KEY_FILE).exists():
                return folder
            with replacing(folder) as aside:
                shutil.rmtree(aside, ignore_errors=True)  # left by a preparation that was killed
                aside.mkdir()
                make(aside)
                (aside / KEY_FILE).write_text(json.dumps({"stage": stage, **key}, indent=1, sort_keys=True))
        return folder

    def folder(self, stage: str, key: dict[str, Any]) -> pathlib.Path:
        return self.root / f"{stage}-{digest(key)}"

    def find(self, stage: str, part: dict[str, Any]) -> pathlib.Path | None:
        """Return the newest complete folder of a stage whose key agrees with `part`, or None."""
        paths = []
        for path in self.root.glob(f"{stage}-*/{KEY_FILE}"):
            key = json.loads(path.read_text())
            if all(key.get(name) == value for name, value in _plain(part).items()):
                paths.append((path.stat().st_mtime, path.parent))
        return max(paths)[1] if paths else None

    def fingerprint(self, path: pathlib.Path) -> str:
        """Return the hash of a file's content, remembered by its size and modification time."""
        memo_path = self.root / "inputs.json"
        memo = json.loads(memo_path.read_text()) if memo_path.exists() else {}
        stat = path.stat()
        name, state = str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
        if memo.get(name, {}).get("state") != state:
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            memo[name] = {"state": state, "content": content}
            with replacing(memo_path, shared=True) as aside:
                aside.write_text(json.dumps(memo, indent=1))
        return memo[name]["content"]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / ".lock"
        with open(path, "w") as file:
            with at(path):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def cache_of(data) -> Cache:
    """Return the cache of a data section."""
    return Cache(pathlib.Path(data.cache_dir or pathlib.Path(data.data_dir) / "cache"))


def digest(key: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(_plain(key), sort_keys=True).encode(), digest_size=8).hexdigest()


def _plain(key: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(key))


def save(folder: pathlib.Path, name: str, array: np.ndarray) -> None:
    np.save(folder / f"{name}.npy", array)


def load(folder: pathlib.Path, name: str) -> np.ndarray:
    """Return the array, memory-mapped: pages are read when touched."""
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def create(folder: pathlib.Path, name: str, shape, dtype) -> np.ndarray:
    """Create an array on disk to write into."""
    return np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=tuple(shape))
