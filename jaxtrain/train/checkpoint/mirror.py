"""A second copy of a run's checkpoints, on another disk or in a bucket (`checkpoint.mirror`).

    DIR/checkpoints/<step>/              as in the run folder
    DIR/fingerprint.json, config.yaml    of the run that it belongs to: a mirror on a disk is a run folder, which every
                                         command can open

After every checkpoint a thread updates the mirror to match the run folder, newest first. A failure is reported once and
retried after the next checkpoint; training continues. On a disk a copy is written under a temporary name and renamed;
in a bucket, which cannot rename, `meta.json` is written last. A copy without it, or with files that differ from it,
does not count.
"""

import pathlib
import posixpath
import threading
import time
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jaxtrain import strict_json
from jaxtrain.errors import UserError
from jaxtrain.redaction import mask
from jaxtrain.runtime import plain_files
from jaxtrain.train.checkpoint import manifest, recorded_model, retention
from jaxtrain.train.checkpoint.retention import COMMITTED, PART
from jaxtrain.train.checkpoint.save_failures import reason_of
from torch_bridge.atomic_file import replacing

FINGERPRINT = "fingerprint.json"
OF_THE_RUN = (FINGERPRINT, "config.yaml", recorded_model.FILE)
LOOK_S = 0.1  # interval at which a waiting caller checks if it should give up


class Unreachable(UserError):
    """The mirror cannot be read now, so its run and its content are unknown."""


class Mirror:
    """The mirror of one run folder.

    place: a folder, or an address that fsspec knows (`s3://bucket/run`, `gs://...`, `memory://...`). folder: the run
    folder. Raises UserError if the address cannot be used at all.
    """

    def __init__(self, place: str, folder: pathlib.Path):
        self.place, self.folder = mask(place), folder.absolute()
        local = "://" not in place and "::" not in place
        try:
            self._files, self._root = fsspec.core.url_to_fs(str(pathlib.Path(place).expanduser()) if local else place)
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"checkpoint.mirror: {self.place}: {mask(str(error))}") from None
        self._is_disk = isinstance(self._files, LocalFileSystem)
        if self._is_disk and pathlib.Path(self._root).resolve().is_relative_to(self.folder.resolve()):
            raise UserError(
                f"checkpoint.mirror: {self.place}: lies in the run folder {self.folder}; wanted another disk's"
            )
        self.run_folder = pathlib.Path(self._root) if self._is_disk else None  # a run folder itself
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._upto: int | None = None  # the newest verified checkpoint; None: nothing to do
        self._held: int | None = None  # the checkpoint being copied; the run must not delete it meanwhile
        self._deferred: list[int] = []  # checkpoints to delete after that
        self._due = self._failed = False
        self._untold: list[str] = []

    # --- reading ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of the mirror's checkpoints, oldest first. Raises Unreachable."""
        try:
            return self._steps()
        except Exception as error:
            raise self._unusable(error) from None

    def meta(self, step: int) -> dict:
        """Return the content of a copy's meta.json, without the histories. Raises UserError."""
        path = self._at(step, manifest.NAME)
        try:
            content = self._files.cat_file(path)
        except Exception as error:
            raise self._unusable(error) from None
        return manifest.parse(content, path)

    def fingerprint(self) -> str | None:
        """Return the text of the mirror's fingerprint.json; None if there is none. Raises Unreachable."""
        try:
            return self._files.cat_file(f"{self._root}/{FINGERPRINT}").decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._unusable(error) from None

    def bring_back(self, step: int, make_room: Callable[[int], bool] = lambda step: True) -> str:
        """Copy a checkpoint to the run folder; return "", or the reason why that failed. make_room: called with the
        step once the copy is found intact; moves a damaged checkpoint away, and returns False if it cannot."""
        part = self.folder / "checkpoints" / f"{step}{PART}"
        try:
            plain_files.delete(part)
            part.mkdir(parents=True)
            why = self._fetch(step, part)
            if not why and not make_room(step):
                why = "the damaged one in its place cannot be renamed"
            if not why:
                part.rename(part.with_suffix(""))
                return ""
        except UserError as error:
            why = str(error)
        except Exception as error:
            why = _why(error)
        plain_files.delete(part)
        return why

    def bring_back_identity(self) -> None:
        """Copy fingerprint.json and config.yaml to a run folder that was lost. Raises Unreachable."""
        for name in OF_THE_RUN:
            try:
                content = self._files.cat_file(f"{self._root}/{name}")
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(self.folder / name) as aside:
                    aside.write_bytes(content)
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._unusable(error) from None

    def _fetch(self, step: int, part: pathlib.Path) -> str:
        try:
            content = self._files.cat_file(self._at(step, manifest.NAME))
        except FileNotFoundError:
            return "its copying never finished"
        sealed = manifest.parse(content, self._at(step, manifest.NAME))
        names = manifest.names(sealed)
        there = self._files.find(self._at(step), detail=True)
        for name in names:
            if there.get(self._at(step, name), {}).get("type") != "file":
                return f"{name}: missing"
        targets = [part / name for name in names]
        for parent in {target.parent for target in targets}:
            parent.mkdir(parents=True, exist_ok=True)
        self._files.get([self._at(step, name) for name in names], [str(target) for target in targets])
        (part / manifest.NAME).write_bytes(content)
        return next(iter(manifest.problems(part, step, _identity((self.fingerprint() or "{}").encode()))), "")

    def _steps(self) -> list[int]:
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(f"{self._root}/checkpoints", detail=True)
        except FileNotFoundError:
            return []
        names = (posixpath.basename(entry["name"].rstrip("/")) for entry in entries if entry["type"] == "directory")
        return sorted(int(name) for name in names if COMMITTED.fullmatch(name))

    def _at(self, step: int | str, *names: str) -> str:
        return posixpath.join(self._root, "checkpoints", str(step), *names)

    def _unusable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"checkpoint.mirror: {self.place}: cannot be read: {_why(error)}; make it reachable, or go on without it "
            "(checkpoint.mirror=null)"
        )

    # --- updating -----------------------------------------------------------------------------------------------

    def update(self, step: int) -> None:
        """Start updating the mirror from the run folder, whose newest verified checkpoint is `step`; does not wait."""
        with self._turn:
            self._upto = step
            self._start()

    def wait(self, patience_s: float = float("inf"), give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the mirror is up to date, `patience_s` have passed, or `give_up` returns True. A failed update is
        retried once."""
        with self._turn:
            if self._failed:
                self._start()
        deadline = time.monotonic() + patience_s
        while (thread := self._thread) is not None and thread.is_alive():
            if time.monotonic() >= deadline or give_up():
                self._untold.append(
                    f"CHECKPOINT {self._upto} IS NOT YET WHOLE in the mirror {self.place}; the next run goes on copying"
                )
                return
            thread.join(LOOK_S)

    def take_failures(self) -> list[str]:
        """Return the warnings since the last call."""
        with self._turn:
            told, self._untold = self._untold, []
        return told

    def defers(self, step: int) -> bool:
        """Return True if a checkpoint is being copied; it is then deleted for the caller once the copy is done."""
        with self._turn:
            if step != self._held:
                return False
            self._deferred.append(step)
            return True

    def _start(self) -> None:
        """Start the thread, or have it run again. The caller holds the lock."""
        self._due = True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="jaxtrain-mirror", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._turn:
                if not self._due:
                    self._thread = None
                    return
                self._due, upto = False, self._upto
            try:
                if upto is not None:
                    self._round(upto)
                self._failed = False
            except Exception as error:
                with self._turn:
                    self._failed = True
                    self._untold.append(
                        f"CHECKPOINT {upto} COULD NOT BE COPIED to the mirror {self.place}: {_why(error)}; training "
                        "goes on, the next try is after the next checkpoint"
                    )

    def _round(self, upto: int) -> None:
        self._mark()
        here = [step for step in retention.committed(self.folder / "checkpoints") if step <= upto]
        for step in reversed(here):
            self._copy(step)
        if here:
            self._delete_all_but({str(step) for step in here})

    def _mark(self) -> None:
        """Write the run's fingerprint and config into the mirror. Raises UserError if it is another run's."""
        for name in OF_THE_RUN:
            if name == recorded_model.FILE and not (self.folder / name).exists():
                continue  # a task's model, which a command builds
            path, content = f"{self._root}/{name}", (self.folder / name).read_bytes()
            there = self._files.cat_file(path) if self._files.exists(path) else None
            if name == FINGERPRINT and there is not None and _identity(there) != _identity(content):
                raise UserError(f"its {FINGERPRINT} is another run's")
            if there != content:
                self._put_bytes(path, content)

    def _copy(self, step: int) -> None:
        local = self.folder / "checkpoints" / str(step)
        with self._turn:
            if not local.is_dir():
                return  # pruned meanwhile
            self._held = step
        try:
            content = (local / manifest.NAME).read_bytes()
            seal = self._at(step, manifest.NAME)
            there = self._files.cat_file(seal) if self._files.exists(seal) else None
            if there == content:
                return
            names = manifest.names(manifest.parse(content, local / manifest.NAME))
            if there is None or _files(there) != _files(content):
                self._put(step, local, names, content)
            else:
                self._put_bytes(seal, content)
        finally:
            with self._turn:
                deferred, self._deferred, self._held = self._deferred, [], None
            for gone in deferred:
                retention.remove(local.parent, str(gone))

    def _put(self, step: int, local: pathlib.Path, names: list[str], seal: bytes) -> None:
        final = self._at(step)
        target = f"{final}{PART}" if self._is_disk else final
        for old in {target, final}:
            self._remove(old)
        for parent in {posixpath.dirname(posixpath.join(target, name)) for name in names} | {target}:
            self._files.makedirs(parent, exist_ok=True)
        self._files.put([str(local / name) for name in names], [posixpath.join(target, name) for name in names])
        self._files.invalidate_cache()
        sizes = {path: told["size"] for path, told in self._files.find(target, detail=True).items()}
        for name in names:
            if sizes.get(posixpath.join(target, name)) != (local / name).stat().st_size:
                raise OSError(f"{name}: not all of it has arrived")
        self._files.pipe_file(posixpath.join(target, manifest.NAME), seal)
        if target != final:
            self._files.mv(target, final, recursive=True)

    def _put_bytes(self, path: str, content: bytes) -> None:
        self._files.makedirs(posixpath.dirname(path), exist_ok=True)
        aside = f"{path}{PART}" if self._is_disk else path
        self._files.pipe_file(aside, content)
        if aside != path:
            self._files.mv(aside, path)

    def _delete_all_but(self, kept: set[str]) -> None:
        for entry in self._files.ls(posixpath.join(self._root, "checkpoints"), detail=True, refresh=True):
            name = posixpath.basename(entry["name"].rstrip("/"))
            if name not in kept and COMMITTED.fullmatch(name.removesuffix(PART)):
                self._remove(entry["name"])

    def _remove(self, path: str) -> None:
        if self._is_disk:
            plain_files.delete(pathlib.Path(path))
        elif self._files.exists(path):
            self._files.rm(path, recursive=True)


def _files(seal: bytes) -> object:
    """Return the files listed in a meta.json; None if it is damaged."""
    try:
        return strict_json.loads(seal)["files"]
    except (ValueError, KeyError, TypeError):
        return None


def _identity(fingerprint: bytes) -> Any:
    try:
        return strict_json.loads(fingerprint)["identity"]
    except (ValueError, KeyError, TypeError):
        return None


def _why(error: Exception) -> str:
    return mask(str(error) if isinstance(error, UserError) else reason_of(error))
