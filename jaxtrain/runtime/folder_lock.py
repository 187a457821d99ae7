"""Allow one run per folder. `run.lock` names the process that trains there; its OS lock ends with that process.

If the filesystem's locks don't reach other hosts, a heartbeat in the file (rewritten every few seconds) decides.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.runtime import plain_files
from jaxtrain.runtime.kept_file import KeptFile
from jaxtrain.runtime.launch import broadcast_from_process_zero

NAME = "run.lock"
ALIVE_S = 5.0  # between two heartbeats
SILENT_S = 20.0  # a holder on another host without a heartbeat for so long is taken for dead
PATIENCE_S = 5.0  # wait for the children of a killed process to end, such as its data workers


class FolderLock:
    """Lock on a run folder, held from `acquire` to `release`. info: called with messages about a stale lock.

    Raises UserError if another process trains in the folder, or if the folder cannot be written to.
    """

    def __init__(self, folder: pathlib.Path, info: Callable[[str], None] = print):
        self.path = folder / NAME
        self.info = info
        self._file: KeptFile | None = None
        self._released = threading.Event()

    def acquire(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plain_files.refuse_links(self.path.parent)
            self._file = KeptFile(self.path, os.O_RDWR)
        except OSError as error:
            raise UserError(
                f"run.dir: cannot write to {self.path.parent}: {error.strerror}; choose another run.dir"
            ) from None
        _OPEN.add(self)
        try:
            self._lock(self._file)
            self._await_silence()
            self._sign(0)
        except OSError as error:
            raise UserError(
                f"run.dir: cannot write to {self.path}: {error.strerror}; make room, or choose another run.dir"
            ) from None
        threading.Thread(target=self._show_life, name="jaxtrain-lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock. Leaves an empty file: removing it could destroy the lock of a process that waits for it."""
        self._released.set()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # not needed: a new run takes over the lock of a process that has ended
                os.ftruncate(file.descriptor(), 0)
            file.close()

    def leave_to_parent(self) -> None:
        """Close the file in a forked child; the lock would last as long as the child has the file open."""
        self._released = threading.Event()  # the old one may be in use by a thread that the child doesn't have
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "FolderLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self, file: KeptFile) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(file.descriptor(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    return  # no locks on this filesystem: the heartbeat decides
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            holder = self._read()
            if time.monotonic() > deadline or (holder and _runs_here(holder)):
                self._refuse(holder)
            time.sleep(0.2)

    def _await_silence(self) -> None:
        """Raise UserError if the recorded holder is alive; on another host, where locks may not reach, watch its
        heartbeat."""
        holder = self._read()
        if not holder:
            return
        who = f"pid {holder['pid']} on {holder['host']}"
        if holder["host"] == socket.gethostname():
            if _runs_here(holder) and holder["pid"] != os.getpid():
                self._refuse(holder)
        else:
            self.info(f"{self.path}: held by {who}; watching for a sign of life for {SILENT_S:.0f} s")
            deadline = time.monotonic() + SILENT_S
            while time.monotonic() < deadline:
                time.sleep(1)
                if self._read() != holder:
                    self._refuse(holder)
        self.info(f"{self.path}: {who} has ended without letting go; taken over")

    def _refuse(self, holder: dict[str, Any] | None) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        if holder and holder["host"] == socket.gethostname() and not _runs_here(holder):
            raise UserError(
                f"run.dir: {who}, which has ended, left processes that still hold {self.path} (`fuser {self.path}` "
                "lists them); end them, or choose another run.dir"
            )
        raise UserError(
            f"run.dir: {who} trains in {self.path.parent} already; wait for it, stop it, or choose another run.dir"
        )

    def _read(self) -> dict[str, Any] | None:
        if self._file is None:
            return None
        try:
            word = json.loads(os.pread(self._file.descriptor(), 4096, 0))
        except (ValueError, RecursionError):
            return None  # empty, or truncated by a crash during a write
        if not isinstance(word, dict) or type(word.get("pid")) is not int or not isinstance(word.get("host"), str):
            return None  # not written by a FolderLock
        return {"started": None, **word}

    def _sign(self, count: int) -> None:
        """Write who holds the lock. Raises OSError."""
        file = self._file
        if file is None:
            return
        if file.lost:
            fcntl.flock(file.descriptor(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        word = {"pid": os.getpid(), "host": socket.gethostname(), "started": _start_of(os.getpid()), "sign": count}
        text = json.dumps(word).encode().ljust(256)
        os.pwrite(file.descriptor(), text, 0)
        os.ftruncate(file.descriptor(), len(text))

    def _show_life(self) -> None:
        count = 0
        while not self._released.wait(ALIVE_S):
            count += 1
            try:
                self._sign(count)
            except OSError:
                continue  # a full or read-only disk: saving checkpoints will report it


_OPEN: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in _OPEN:
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def held_by_all(folder: pathlib.Path) -> Iterator[None]:
    """Keep other runs out of a folder; process 0 holds the lock for all processes of this run."""
    lock = FolderLock(folder)
    broadcast_from_process_zero("lock", lock.acquire)
    try:
        yield
    finally:
        lock.release()


def _runs_here(holder: dict[str, Any]) -> bool:
    """Return True if exactly this process is alive on this host; its pid may have been reused by another one."""
    return holder["host"] == socket.gethostname() and _start_of(holder["pid"]) == holder["started"] is not None


def _start_of(pid: int) -> str | None:
    """Return when a process of this host started, in kernel ticks; None if there is no such process.

    Without /proc (not Linux), return "alive" for any process with this pid.
    """
    stat = pathlib.Path(f"/proc/{pid}/stat")
    if pathlib.Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"
