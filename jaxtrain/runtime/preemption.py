"""Preemption: SIGTERM, SIGUSR1 or SIGHUP ends a run with exit code 75, its state saved, whatever it is doing. Ctrl-C
does the same with exit code 130; a second one ends it at once.

A thread hears of the signal at once, also while the main thread compiles. The main thread asks `proceed` before every
piece of work and leaves by `Interrupted`, at the same piece on every process: processes vote. Where it does not come to
ask within half the grace period, and its state is at rest (compiling, evaluating, waiting for data), the thread saves.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.runtime import ended_by_ctrl_c, handlers
from jaxtrain.runtime.leaving import leave

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
EXIT_CODE = 75  # sysexits' EX_TEMPFAIL: start me again
INTERRUPTED = 130  # 128 + SIGINT, as shells have it: whoever pressed Ctrl-C does not want it started again
GRACE_S = 30.0
POLL_S = 0.5  # how often a process looks whether another one was told


class Interrupted(Exception):
    """The run is to be saved now; raised where its state is whole."""


class Preempted(SystemExit):
    """The run was saved; the process ends with exit code 75, or 130 after a Ctrl-C."""

    def __init__(self, code: int = EXIT_CODE):
        super().__init__(code)


def was_saved(error: BaseException) -> bool:
    """Tell whether an exception ends a run that was saved: Preempted, or the KeyboardInterrupt of `saved`."""
    return isinstance(error, Preempted) or ended_by_ctrl_c.is_marked(error)


@dataclasses.dataclass
class _Run:
    """A run that can be saved. emergency_save: saves it from another thread. last: names its last checkpoint."""

    grace_s: float
    emergency_save: Callable[[], None]
    last: Callable[[], str]
    resting: bool = False
    stopped: bool = False


class Preemption:
    """Handle the signals of this process. They concern the innermost run of the main thread: one that a callback
    trains while it lasts, then the run around it. Without a run there is nothing to save; one in another thread neither
    hears of them nor changes what they do.

    Before `listen` and outside the main thread, where Python takes no signals, it never interrupts anybody. In a
    command (`listen(command=True)`) the signals are the run's alone, at any moment of the process; a script or notebook
    that calls Trainer.train() gets a KeyboardInterrupt after a Ctrl-C instead of its end, and the second one at once.
    """

    def __init__(self):
        self._command, self._process = False, os.getpid()
        self._interrupts = 0  # Ctrl-Cs so far
        self.why = ""  # "SIGTERM", once told
        self.told = threading.Event()
        self._ended = threading.Event()  # nobody is left to be saved: the deadline no longer ends the process
        self._deadline = float("inf")
        self._run: _Run | None = None
        self._turn = threading.RLock()  # held by whoever decides about the state
        self._pieces = 0  # of work that the main thread has gone on to
        self._stop_at: int | None = None  # it may not go on to this one
        self._reader, self._writer = -1, -1
        self._before: dict[int, Any] = {}  # handlers
        self._pythons: dict[int, int] = {}  # addresses of the function that calls Python's handlers

    # --- signals ------------------------------------------------------------------------------------------------

    def listen(self, command: bool = False) -> bool:
        """Take the signals from now on; False where that is not possible or done already. One that is ignored (nohup,
        a script's background job) stays so, and so does one that C code handles (faulthandler.register)."""
        if self._before or not _in_main_thread():
            return False
        self.told.clear()  # of an earlier run in this process, which has ended
        self._command, self._interrupts, self._process = command, 0, os.getpid()
        self._ended = threading.Event()  # a thread that sees an earlier signal through keeps that run's
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        taken = [number for number in SIGNALS if handlers.can_be_taken(number)]
        self._before = {number: signal.signal(number, self._wake) for number in taken}
        self._pythons = {number: handlers.address(number) for number in taken}
        # A process is born with the signals blocked that its parent, perhaps a fork server, had blocked.
        self._blocked_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS) & set(SIGNALS)
        # A Python handler waits until the main thread is back from C++; the pipe is written at once.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=[self._reader], name="jaxtrain-preemption", daemon=True).start()
        return True

    @contextlib.contextmanager
    def listening(self, command: bool = False) -> Iterator[None]:
        """Signals are taken within, and given back after; a process that obeys one has ended with it."""
        mine, obeyed = self.listen(command), False
        try:
            yield
        except Preempted:
            obeyed = True
            raise
        finally:
            if mine and not obeyed:
                self.close()

    def close(self) -> None:
        """Give the signals back; one that somebody has taken meanwhile stays theirs."""
        self._ended.set()
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            if self._has(number):
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked_before)
        self._before = {}
        os.close(self._writer)

    def _has(self, number: int) -> bool:
        """Tell whether the handler is the one that was set by `listen`."""
        return signal.getsignal(number) == self._wake and handlers.address(number) == self._pythons[number]

    def forget(self) -> None:
        """In a child that this process forked: it has no run, and its signals are not the run's. SIGTERM, by which
        multiprocessing ends it, is as it was; the others go to all of a job, whose run needs its helpers still."""
        self._turn, self._run, self._stop_at = threading.RLock(), None, None
        self._ended.set()
        if not self._before:
            return
        before, self._before = self._before, {}
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(self._wakeup_before)
            if signal.SIGTERM in before and self._has(signal.SIGTERM):
                signal.signal(signal.SIGTERM, before[signal.SIGTERM])
            os.close(self._reader)
            os.close(self._writer)

    def _wake(self, number: int, frame: object) -> None:
        """In the main thread, when it is back from C++. The pipe has told the other thread already."""
        if number == signal.SIGINT and not self._command:
            self._interrupts += 1
            if self._interrupts > 1 or (self._run is None and os.getpid() == self._process):
                raise KeyboardInterrupt

    def _hear(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number not in SIGNALS:
                    continue
                if number == signal.SIGINT and self._command:
                    self._interrupts += 1
                    if self._interrupts > 1:
                        self._exit("interrupted again: left at once", INTERRUPTED)
                if not self.told.is_set():  # the first one says why
                    self._tell(signal.Signals(number).name)
        os.close(reader)

    def _tell(self, why: str) -> None:
        with self._turn:
            if self.told.is_set():
                return
            grace_s = GRACE_S if self._run is None else self._run.grace_s
            self.why, self._deadline = why, float("inf") if self._may_wait(why) else time.monotonic() + grace_s
            self.told.set()
            ended = self._ended
        threading.Thread(target=self._see_it_through, args=[ended], name="jaxtrain-preempted", daemon=True).start()

    def _may_wait(self, why: str) -> bool:
        """Return True if there is no deadline: the process continues after Ctrl-C in a script or notebook."""
        return why.startswith("SIGINT") and not self._command and _processes() == 1

    @property
    def what(self) -> str:
        """The end in words: "preempted (SIGTERM)"."""
        return f"{'interrupted' if self.why.startswith('SIGINT') else 'preempted'} ({self.why})"

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.why.startswith("SIGINT") else EXIT_CODE

    def saved(self) -> BaseException:
        """Return the exception to raise once the run is saved. After a Ctrl-C a script or notebook is told as of any
        other Ctrl-C."""
        if not self._may_wait(self.why):
            return Preempted(self.exit_code)
        last = "" if self._run is None else f": {self._run.last()}. Start it again to go on"
        return ended_by_ctrl_c.marked(f"{self.what}{last}")

    # --- the run ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attached(self, grace_s: float, emergency_save: Callable[[], None], last: Callable[[], str]) -> Iterator[None]:
        """A run that can be saved, within another one perhaps, which can be saved again afterwards. emergency_save:
        saves it from another thread. last: names its last checkpoint, in words."""
        if not _in_main_thread():
            yield
            return
        mine = self.listen()
        with self._turn:
            outer, self._run = self._run, _Run(grace_s, emergency_save, last)
            if outer is None:  # pieces of work are counted through, so that all processes stop at the same one
                self._pieces, self._stop_at = 0, None
        ended = threading.Event()
        if _processes() > 1 and outer is None:
            threading.Thread(target=self._hear_others, args=[ended], name="jaxtrain-vote", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            with self._turn:
                self._run = outer
                if outer is None:
                    self._stop_at = None
                if mine:
                    self.close()

    def proceed(self) -> None:
        """Before every piece of work that all processes do in the same order. Raises Interrupted where it must not."""
        with self._turn:
            if self.due:
                if self._run is not None:
                    self._run.stopped = True
                raise Interrupted
            self._pieces += _in_main_thread()

    @property
    def due(self) -> bool:
        """Return True if `proceed` would raise."""
        return self._stop_at is not None and self._pieces >= self._stop_at and _in_main_thread()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """While the state is whole and the main thread does not touch it."""
        run = self._run if _in_main_thread() else None
        if run is None:
            yield
            return
        with self._turn:
            run.resting = True
        try:
            yield
        finally:
            with self._turn:  # whoever saves meanwhile ends the process and never gives it back
                run.resting = False

    # --- the end ------------------------------------------------------------------------------------------------

    def _see_it_through(self, run_ended: threading.Event) -> None:
        run = None
        with contextlib.suppress(Exception):  # a vote without an answer ends at the deadline
            with self._turn:
                if run_ended.is_set():
                    return
                run = self._run
                if run is None:
                    if self._may_wait(self.why):
                        return
                    self._exit(f"{self.what}: nothing to save at this point", self.exit_code)
                self._stop_at = max(self._votes("pieces", self._pieces))
                if self._may_wait(self.why):
                    return
            if not run_ended.wait(self.left_s - run.grace_s / 2):
                self._save_for_main(run_ended)
        if not run_ended.wait(self.left_s):
            run = self._run or run
            grace_s, last = (GRACE_S, "") if run is None else (run.grace_s, run.last())
            self._exit(
                f"{self.what}: the grace period of {grace_s:g} s (checkpoint.grace_s) is over; {last}", self.exit_code
            )

    def _save_for_main(self, run_ended: threading.Event) -> None:
        """The main thread has not come to ask. Several processes do this together or not at all."""
        with self._turn:
            if run_ended.is_set():
                return
            run = self._run
            whole = run is not None and (run.resting or run.stopped)
            places = self._votes("places", self._pieces if whole else -1)
            if run is None or run.stopped or places != places[:1] * len(places) or not whole:
                return
            run.emergency_save()
            self._votes("saved", 1)
            self._exit(f"{self.what}: {run.last()}. Start the same command again to go on", self.exit_code)

    def _hear_others(self, ended: threading.Event) -> None:
        """Tell all processes of a signal that one of them got, and get to know of theirs."""
        key = f"jaxtrain/told/{_process()}"
        with contextlib.suppress(Exception):  # the coordinator is gone: the watchdog's matter
            while not ended.wait(POLL_S):
                if self.told.is_set():
                    _store().key_value_set(key, f"{self.why} on process {_process()}", allow_overwrite=True)
                    return
                for _, why in _store().key_value_dir_get("jaxtrain/told/"):
                    self._tell(why)
                    return

    def _votes(self, topic: str, mine: int) -> list[int]:
        """Exchange one number per process; return all of them, by process."""
        if _processes() == 1:
            return [mine]
        store, prefix = _store(), f"jaxtrain/preemption/{topic}/"
        store.key_value_set(f"{prefix}{_process()}", json.dumps(mine), allow_overwrite=True)
        wait_ms = lambda: max(1, int(self.left_s * 1000))
        return [int(store.blocking_key_value_get(f"{prefix}{p}", wait_ms())) for p in range(_processes())]

    @property
    def left_s(self) -> float:
        """Seconds left of the grace period; infinite where there is none."""
        return max(0.0, self._deadline - time.monotonic())

    def _exit(self, message: str, code: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone has sent the SIGHUP
            print(message, file=sys.stderr, flush=True)
        if _processes() > 1 and _process() == 0:
            time.sleep(0.5)  # the others hear the last answers of the store that lives in this process
        leave(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _processes() -> int:
    """1 until this process has connected to the others. Asking jax.process_count() would start its backend."""
    state = _distributed()
    return 1 if state is None else state.num_processes or 1


def _process() -> int:
    state = _distributed()
    return 0 if state is None else state.process_id or 0


def _store():
    return _distributed().client


def _distributed():
    """JAX's state of the group, None where it is not imported whole: a thread that imported it while the main thread
    is about to would break that import."""
    return getattr(sys.modules.get("jax._src.distributed"), "global_state", None)


PREEMPTION = Preemption()  # signals belong to the process
os.register_at_fork(after_in_child=PREEMPTION.forget)
