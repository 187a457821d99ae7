"""Detect hangs: end the run if a process makes no progress or stops answering, and name that process."""

import contextlib
import faulthandler
import json
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime.launch import coordination
from jaxtrain.runtime.leaving import leave
from jaxtrain.runtime.plain_files import open_plain

HEARTBEAT_S = 2.0
LOST_S = 20.0  # a process without a heartbeat for so long is taken for dead or stopped
SLACK = 20  # a step may take this many times the longest one so far
LEAST_S = 300.0  # the limit is never shorter: evaluations and checkpoints happen between steps


class ProcessLostError(UserError):
    """Raised if another process of the run was killed, stopped or disconnected."""

    exit_code = 1


class Watchdog:
    """Watches this process's progress and the other processes' heartbeats from a thread.

    folder: where Python stacks are written (`stacks_<process>.txt`). limit_s: end the process after so long without
    progress; None: derive the limit from the durations of the run's steps.
    """

    def __init__(self, folder: pathlib.Path, limit_s: float | None = None):
        self.folder = folder
        self.limit_s = limit_s
        self.step = 0
        self._longest = 0.0
        self._at_ease = False
        self._last = time.monotonic()
        self._beats = 0
        self._seen: dict[int, tuple[dict, float]] = {}  # process -> its last heartbeat and the time we saw it
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxtrain-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(HEARTBEAT_S * 2)

    def beat(self, step: int) -> None:
        """Record that a step was dispatched; the training loop calls it."""
        now = time.monotonic()
        if self.step:
            self._longest = max(self._longest, now - self._last)
        self.step, self._last = step, now

    @contextlib.contextmanager
    def at_ease(self) -> Iterator[None]:
        """Suspend the derived limit in this context, in which the user's own code runs; an explicit limit_s holds."""
        self._at_ease = True
        try:
            yield
        finally:
            self._at_ease, self._last = False, time.monotonic()

    def find_lost_process(self, wait_s: float = LOST_S + 2 * HEARTBEAT_S) -> str:
        """Wait, after a failed collective, for a process to miss its heartbeat; describe it ("" on timeout)."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            lost = self._lost()
            if lost:
                return lost
            time.sleep(0.5)
        return ""

    def explain(self, error: Exception) -> None:
        """Raise ProcessLostError if an error, such as a failed collective, comes from a lost process."""
        lost = self.find_lost_process() if jax.process_count() > 1 and not isinstance(error, UserError) else ""
        if lost:
            raise ProcessLostError(f"{lost}. Start the same command again to go on from the last checkpoint") from error

    def _watch(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            stuck_s = time.monotonic() - self._last
            limit = self.limit_s or max(LEAST_S, SLACK * self._longest)
            if self.step and stuck_s > limit and not (self._at_ease and self.limit_s is None):
                self._end(
                    f"no progress for {stuck_s:.0f} s after step {self.step} (limit {limit:.0f} s). {self._latest()}"
                )
            if jax.process_count() > 1:
                lost = self._lost(publish=True)
                if lost:
                    self._end(lost)

    def _lost(self, publish: bool = False) -> str:
        """Exchange heartbeats; return a message about processes that have stopped answering, or ""."""
        now = time.monotonic()
        me = jax.process_index()
        try:
            if publish:
                self._beats += 1
                word = {"beat": self._beats, "step": self.step, "host": socket.gethostname(), "pid": os.getpid()}
                coordination().key_value_set(f"jaxtrain/heartbeat/{me}", json.dumps(word), allow_overwrite=True)
            told = dict(coordination().key_value_dir_get("jaxtrain/heartbeat/"))
        except Exception as error:
            return f"process 0 (the coordinator) does not answer: {' '.join(str(error).split())[:120]}"
        for key, text in told.items():
            process, word = int(key.rsplit("/", 1)[1]), json.loads(text)
            if process not in self._seen or self._seen[process][0]["beat"] != word["beat"]:
                self._seen[process] = (word, now)
        late = {p: (w, now - at) for p, (w, at) in self._seen.items() if p != me and now - at > LOST_S}
        return "; ".join(
            f"process {p} (host {w['host']}, pid {w['pid']}) has not answered for {age:.0f} s, last at step "
            f"{w['step']}: killed, stopped or cut off"
            for p, (w, age) in late.items()
        )

    def _latest(self) -> str:
        """Return a message that names the processes furthest behind; "" if there is one process only."""
        if len(self._seen) < 2:
            return ""
        steps = {p: w["step"] for p, (w, _) in self._seen.items()}
        behind = [str(p) for p, step in steps.items() if step == min(steps.values())]
        least, most = min(steps.values()), max(steps.values())
        return f"Furthest behind: process {', '.join(behind)} at step {least} (others at {most})"

    def _end(self, reason: str) -> None:
        path = self.folder / f"stacks_{jax.process_index()}.txt"
        with contextlib.suppress(OSError), open(path, "w", opener=open_plain) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"error: process {jax.process_index()}: {reason}\nPython stacks are in {path}. Start the same command "
            "again to go on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        leave(1)
