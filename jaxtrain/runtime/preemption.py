"""Preemption: on SIGTERM, SIGUSR1 or SIGHUP, save the run and exit with code 75, whatever it is doing. Ctrl-C does the
same with exit code 130; a second Ctrl-C ends the run at once.

A thread receives the signal at once, even while the main thread compiles. The main thread calls `proceed` before every
piece of work and leaves by `Interrupted`, at the same piece on every process: processes vote. If it does not call
`proceed` within half the grace period, and its state is at rest (compiling, evaluating, waiting for data), the thread
saves.
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
EXIT_CODE = 75  # sysexits' EX_TEMPFAIL: the job should be started again
INTERRUPTED = 130  # 128 + SIGINT, as in shells: after Ctrl-C the job should not be started again
GRACE_S = 30.0
POLL_S = 0.5  # how often a process checks if another one got a signal


class Interrupted(Exception):
    """Raised when the run must be saved now, at a point where its state is consistent."""


class Preempted(SystemExit):
    """Raised once the run is saved; the process ends with exit code 75, or 130 after a Ctrl-C."""

    def __init__(self, code: int = EXIT_CODE):
        super().__init__(code)


def was_saved(error: BaseException) -> bool:
    """Return True if an exception ends a run that was saved: Preempted, or the KeyboardInterrupt of `saved`."""
    return isinstance(error, Preempted) or ended_by_ctrl_c.is_marked(error)


@dataclasses.dataclass
class _Run:
    """A run that can be saved. emergency_save: saves it from another thread. last: names its last checkpoint.
    resting: its state is consistent and not in use. stopped: `proceed` has raised Interrupted."""

    grace_s: float
    emergency_save: Callable[[], None]
    last: Callable[[], str]
    resting: bool = False
    stopped: bool = False


class Preemption:
    """Handles the signals of this process.

    Signals concern the innermost run of the main thread: a run that a callback trains, and after it the run around it.
    Without a run there is nothing to save. A run in another thread is not told of signals and does not change what they
    do. Before `listen` and outside the main thread, where Python takes no signals, nothing is interrupted.

    In a command (`listen(command=True)`) the signals belong to the run at any moment of the process. In a script or
    notebook that calls Trainer.train(), a Ctrl-C leads to a KeyboardInterrupt instead of ending the process; a second
    Ctrl-C raises it at once.
    """

    def __init__(self):
        self._command, self._process = False, os.getpid()
        self._interrupts = 0  # number of Ctrl-Cs so far
        self.why = ""  # "SIGTERM", once a signal has come
        self.told = threading.Event()
        self._ended = threading.Event()  # no run is left to be saved: the deadline no longer ends the process
        self._deadline = float("inf")
        self._run: _Run | None = None
        self._turn = threading.RLock()  # protects the decision to save, and the fields that it depends on
        self._pieces = 0  # pieces of work that the main thread has begun
        self._stop_at: int | None = None  # number of the piece that it must not begin
        self._reader, self._writer = -1, -1
        self._before: dict[int, Any] = {}  # previous handlers
        self._pythons: dict[int, int] = {}  # addresses of the function that calls Python's handlers

    # --- signals ------------------------------------------------------------------------------------------------

    def listen(self, command: bool = False) -> bool:
        """Handle the signals from now on; return False if that is not possible or already done.

        A signal that is ignored (nohup, a script's background job) or handled by C code (faulthandler.register) is left
        as it is.
        """
        if self._before or not _in_main_thread():
            return False
        self.told.clear()  # left from an earlier run in this process, which has ended
        self._command, self._interrupts, self._process = command, 0, os.getpid()
        self._ended = threading.Event()  # a thread that still handles an earlier signal keeps the old event
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        taken = [number for number in SIGNALS if handlers.can_be_taken(number)]
        self._before = {number: signal.signal(number, self._wake) for number in taken}
        self._pythons = {number: handlers.address(number) for number in taken}
        # A process starts with the signals blocked that its parent, perhaps a fork server, had blocked.
        self._blocked_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS) & set(SIGNALS)
        # A Python handler runs only when the main thread returns from C++; the pipe is written at once.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=[self._reader], name="jaxtrain-preemption", daemon=True).start()
        return True

    @contextlib.contextmanager
    def listening(self, command: bool = False) -> Iterator[None]:
        """Handle signals in this context and restore the handlers afterwards, unless Preempted ends the process."""
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
        """Restore the previous handlers, except for signals whose handler other code has changed since."""
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
        """Return True if the signal's handler is still the one that `listen` set."""
        return signal.getsignal(number) == self._wake and handlers.address(number) == self._pythons[number]

    def forget(self) -> None:
        """Reset the state in a forked child: it has no run, and its signals are not the run's.

        SIGTERM gets its previous handler, because multiprocessing ends the child by it. The other signals stay handled:
        they go to all processes of a job, and the run still needs its helpers.
        """
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
        """Handle a signal in the main thread, once it is back from C++. The pipe has told the other thread already."""
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
                if not self.told.is_set():  # the first signal is the reason
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
        """The reason of the end for messages, such as "preempted (SIGTERM)"."""
        return f"{'interrupted' if self.why.startswith('SIGINT') else 'preempted'} ({self.why})"

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.why.startswith("SIGINT") else EXIT_CODE

    def saved(self) -> BaseException:
        """Return the exception to raise once the run is saved: Preempted, or a KeyboardInterrupt after Ctrl-C in a
        script or notebook."""
        if not self._may_wait(self.why):
            return Preempted(self.exit_code)
        last = "" if self._run is None else f": {self._run.last()}. Start it again to go on"
        return ended_by_ctrl_c.marked(f"{self.what}{last}")

    # --- the run ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attached(self, grace_s: float, emergency_save: Callable[[], None], last: Callable[[], str]) -> Iterator[None]:
        """Register a run that can be saved in this context; an outer run becomes current again afterwards.

        emergency_save: saves the run from another thread. last: returns text that names its last checkpoint.
        """
        if not _in_main_thread():
            yield
            return
        mine = self.listen()
        with self._turn:
            outer, self._run = self._run, _Run(grace_s, emergency_save, last)
            if outer is None:  # an inner run continues the count of pieces, so that all processes stop at the same one
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
        """Call this before every piece of work that all processes do in the same order.

        Raises Interrupted if the run must stop before this piece.
        """
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
        """Mark a context in which the run's state is consistent and the main thread does not use it."""
        run = self._run if _in_main_thread() else None
        if run is None:
            yield
            return
        with self._turn:
            run.resting = True
        try:
            yield
        finally:
            with self._turn:  # blocks forever if the thread is saving: it then ends the process
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
        """Save the run from this thread, because the main thread has not called `proceed`, and exit.

        With several processes, all of them save or none does.
        """
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
        """Tell the other processes of this process's signal, and learn of theirs."""
        key = f"jaxtrain/told/{_process()}"
        with contextlib.suppress(Exception):  # the coordinator is gone: the watchdog handles that
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
        """Seconds left of the grace period; infinite if there is no deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def _exit(self, message: str, code: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # SIGHUP may mean that the terminal is gone
            print(message, file=sys.stderr, flush=True)
        if _processes() > 1 and _process() == 0:
            time.sleep(0.5)  # let the others read their last answers from the store, which this process runs
        leave(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _processes() -> int:
    """Return the number of processes, 1 until this process has connected. jax.process_count() would start a backend."""
    state = _distributed()
    return 1 if state is None else state.num_processes or 1


def _process() -> int:
    state = _distributed()
    return 0 if state is None else state.process_id or 0


def _store():
    return _distributed().client


def _distributed():
    """Return JAX's state of the process group, None unless it has been imported completely.

    Importing it in this thread could break an import of JAX that is in progress in the main thread.
    """
    return getattr(sys.modules.get("jax._src.distributed"), "global_state", None)


PREEMPTION = Preemption()  # signals belong to the process
os.register_at_fork(after_in_child=PREEMPTION.forget)
