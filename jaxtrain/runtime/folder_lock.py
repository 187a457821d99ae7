"""One run per folder: `run.lock` says who trains there, and the system's lock on it ends with its process.

Where the filesystem's locks do not reach other hosts, the file's sign of life (rewritten every few seconds) decides.
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
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.runtime import plain_files
from jaxtrain.runtime.launch import broadcast_from_process_zero

NAME = "run.lock"
ALIVE_S = 5.0  # between two signs of life
SILENT_S = 20.0  # a holder on another host without one for so long is gone
PATIENCE_S = 5.0  # for what a killed process has left behind, as its data workers, to end


class FolderLock:
    """Held from `acquire` to `release`. say: hears of a stale lock.

    Raises UserError where another process trains in the folder, or the folder cannot be written.
    """

    def __init__(self, folder: pathlib.Path, info: Callable[[str], None] = print):
        self.path = folder / NAME
        self.info = info
        self._file = -1
        self._released = threading.Event()

    def acquire(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plain_files.refuse_links(self.path.parent)
            self._file = plain_files.open_plain(self.path, os.O_RDWR)
        except OSError as error:
            raise UserError(
                f"run.dir: cannot write to {self.path.parent}: {error.strerror}; choose another run.dir"
            ) from None
        try:
            self._lock()
            self._await_silence()
            self._sign(0)
        except OSError as error:
            raise UserError(
                f"run.dir: cannot write to {self.path}: {error.strerror}; make room, or choose another run.dir"
            ) from None
        threading.Thread(target=self._show_life, name="jaxtrain-lock", daemon=True).start()

    def release(self) -> None:
        """Leaves an empty file: removing it could take away the lock of whoever waits for it."""
        if self._file < 0:
            return
        self._released.set()
        try:
            os.ftruncate(self._file, 0)
        finally:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "FolderLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    return  # no locks on this filesystem: the sign of life decides
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            holder = self._read()
            if time.monotonic() > deadline or (holder and _runs_here(holder)):
                self._refuse(holder)
            time.sleep(0.2)

    def _await_silence(self) -> None:
        """The lock is ours, but a holder on another host may not know of it."""
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
        os.close(self._file)
        self._file = -1
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        raise UserError(
            f"run.dir: {who} trains in {self.path.parent} already; wait for it, stop it, or choose another run.dir"
        )

    def _read(self) -> dict[str, Any] | None:
        try:
            word = json.loads(os.pread(self._file, 4096, 0))
        except (ValueError, RecursionError):
            return None  # empty, or cut off by a crash while it was written
        if not isinstance(word, dict) or type(word.get("pid")) is not int or not isinstance(word.get("host"), str):
            return None  # no holder of this lock wrote it
        return {"started": None, **word}

    def _sign(self, count: int) -> None:
        word = {"pid": os.getpid(), "host": socket.gethostname(), "started": _start_of(os.getpid()), "sign": count}
        text = json.dumps(word).encode().ljust(256)
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    def _show_life(self) -> None:
        count = 0
        while not self._released.wait(ALIVE_S):
            count += 1
            try:
                self._sign(count)
            except OSError:
                continue  # a full or read-only disk: the checkpoints say so


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
    """When a process of this host started, in the kernel's ticks; None where there is no such process.

    Without /proc (not Linux) the number alone has to do.
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
