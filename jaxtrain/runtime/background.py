"""Compile programs in a thread of their own, so that nobody waits for XLA: torch computes until a program is there."""

import atexit
import collections
import logging
import os
import threading
import time
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.runtime import compile_cache
from jaxtrain.runtime.waits import LONG_S, speaks

WAIT = "JAXTRAIN_WAIT"

log = logging.getLogger(__name__)


def waits_for_programs() -> bool:
    """Return True if the environment asks to wait for every program: JAXTRAIN_WAIT=1. Raises UserError for a value other
    than 0 and 1."""
    value = os.environ.get(WAIT, "0")
    if value not in ("0", "1"):
        raise UserError(f"{WAIT}={value!r}: set it to 1 to wait for each program, or to 0 to compute in torch meanwhile")
    return value == "1"


class Compilation:
    """A program that XLA compiles, or will.

    lowered: what `jax.jit(...).lower(...)` returns. program: the compiled one, once it is `done`.
    """

    def __init__(self, lowered: Any):
        self._lowered: Any = lowered
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.program: Any = None

    def done(self) -> bool:
        """Return True once the program is there. Raises what the compiler has raised, at each call."""
        if not self._over.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        """Compile in this thread."""
        try:
            self.program = self._lowered.compile()
            compile_cache.note(self._lowered)
        except Exception as error:  # raised where the program is asked for
            self._error = error
        self._lowered = None
        self._over.set()


class _Queue:
    """Programs that wait for the compiler, and the thread that compiles them one after another: XLA shares a program
    among the cores itself. The thread ends when nothing waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[Compilation] = collections.deque()
        self._thread: threading.Thread | None = None
        self._began, self._count = 0.0, 0
        self._told = False

    def put(self, compilation: Compilation) -> None:
        with self._lock:
            self._waiting.append(compilation)
            if self._thread is None:
                self._began, self._count = time.perf_counter(), 0
                self._thread = threading.Thread(target=self._work, name="jaxtrain compiler", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    break
                compilation = self._waiting.popleft()
            compilation.run()
            self._count += 1
        if not self._told and speaks():
            self._told = True
            took = time.perf_counter() - self._began
            programs = "a program" if self._count == 1 else f"{self._count} programs"
            log.warning("XLA has compiled %s in %.0f s: it computes from here on, torch did meanwhile", programs, took)

    def close(self) -> None:
        """Drop what waits, and wait for the program in work: Python cannot shut down around it."""
        with self._lock:
            self._waiting.clear()
            self._told = True
            thread = self._thread
        if thread is not None:
            thread.join(LONG_S)
            if thread.is_alive() and speaks():
                log.warning("the process ends once XLA has compiled the program that it is at")
            thread.join()


_queue = _Queue()


def compile_later(lowered: Any) -> Compilation:
    """Have a program compiled in the background. lowered: what `jax.jit(...).lower(...)` returns."""
    compilation = Compilation(lowered)
    _queue.put(compilation)
    return compilation


def _begin_anew() -> None:
    """Forget the thread in a forked process, which has none."""
    global _queue
    _queue = _Queue()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _queue.close())
