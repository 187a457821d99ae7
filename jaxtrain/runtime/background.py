"""Compile programs in the background, so that nobody waits for XLA: torch computes until a program is there."""

import atexit
import collections
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime import compile_cache
from jaxtrain.runtime.compile_process import CompileProcess, called
from jaxtrain.runtime.waits import LONG_S, speaks

WAIT = "JAXTRAIN_WAIT"

log = logging.getLogger(__name__)


def waits_for_programs() -> bool:
    """Return True if the environment asks to wait for every program: JAXTRAIN_WAIT=1. Raises UserError for a value
    other than 0 and 1."""
    value = os.environ.get(WAIT, "0")
    if value not in ("0", "1"):
        raise UserError(
            f"{WAIT}={value!r}: set it to 1 to wait for each program, or to 0 to compute in torch meanwhile"
        )
    return value == "1"


class Compilation:
    """A program that XLA compiles, or will.

    lowered: what `jax.jit(...).lower(...)` returns. exported: the same in bytes, for another process; None if it cannot
    be. donated: positions of the arguments that it donates. program: the compiled one, once it is `done`.
    """

    def __init__(self, lowered: Any, exported: bytearray | None = None, donated: tuple[int, ...] = ()):
        self._lowered: Any = lowered
        self.exported, self.donated = exported, donated
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
        """Compile in this thread, or load from the compile cache."""
        try:
            self.program = self._lowered.compile()
            compile_cache.note(self._lowered)
        except Exception as error:  # raised where the program is asked for
            self._error = error
        self._lowered = self.exported = None
        self._over.set()


def compiled(function: Callable, arguments: tuple) -> Compilation:
    """Compile a function that `jax.jit` has returned now, for such arguments."""
    compilation = Compilation(function.lower(*arguments))
    compilation.run()
    return compilation


def compile_later(function: Callable, arguments: tuple, portable: bool, donated: tuple[int, ...] = ()) -> Compilation:
    """Have a function that `jax.jit` has returned compiled in the background for such arguments; at once if the compile
    cache has it. Trace it before, for the errors of that. portable: JAX may export it. donated: positions of the
    arguments that it donates."""
    exported = _exported(function, arguments) if portable else None
    same = function if exported is None else called(jax.export.deserialize(exported), donated)  # as the process has it
    lowered = same.lower(*arguments)
    if compile_cache.holds(lowered):
        compilation = Compilation(lowered)
        compilation.run()
        return compilation
    compilation = Compilation(lowered, exported, donated)
    _queue.put(compilation)
    return compilation


def _exported(function: Any, arguments: tuple) -> bytearray | None:
    try:
        return jax.export.export(function)(*arguments).serialize()
    except (ValueError, NotImplementedError) as error:  # a call of a library whose form may change, say
        log.debug("a program is compiled in this process: %s", error)
        return None


class _Queue:
    """Programs that wait for the compiler, and the thread that sees to them one after another, as XLA spreads one
    program over the cores. The thread ends when nothing waits. Another process compiles, this one loads the result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[Compilation] = collections.deque()
        self._thread: threading.Thread | None = None
        self._process: CompileProcess | None = None
        self._closed = self._told = False
        self._began, self._count = 0.0, 0

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
                if self._closed or not self._waiting:
                    self._thread = None
                    break
                compilation = self._waiting.popleft()
            if compilation.exported is not None:
                self._into_cache(compilation.exported, compilation.donated)
            if not self._closed:
                compilation.run()
                self._count += 1
        if not self._told and not self._closed and speaks():
            self._told = True
            took = time.perf_counter() - self._began
            programs = "a program" if self._count == 1 else f"{self._count} programs"
            log.warning("XLA has compiled %s in %.0f s: it computes from here on, torch did meanwhile", programs, took)

    def _into_cache(self, exported: bytearray, donated: tuple[int, ...]) -> None:
        """Compile in the other process. Where there is none, or it fails, the thread compiles."""
        cache = jax.config.jax_compilation_cache_dir
        if self._process is None and cache and jax.config.jax_enable_compilation_cache:
            try:
                process = CompileProcess(pathlib.Path(cache))
            except OSError as error:
                log.debug("no process for the compiler: %s", error)
                return
            with self._lock:
                self._process = process
                if self._closed:
                    process.end()
        if self._process is not None and not self._process.compile(exported, donated) and not self._closed:
            self._process.end()
            self._process = None

    def close(self) -> None:
        """Drop what waits, end the other process, and wait for a program that this one is compiling or loading: Python
        cannot shut down around it."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if self._process is not None:
                self._process.end()
        if thread is not None:
            thread.join(LONG_S)
            if thread.is_alive() and speaks():
                log.warning("the process ends once XLA has compiled the program that it is at")
            thread.join()


_queue = _Queue()


def _begin_anew() -> None:
    """Forget the thread in a forked process, which has none."""
    global _queue
    _queue = _Queue()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _queue.close())
