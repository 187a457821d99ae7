"""Pools that read samples, in the calling thread or in worker processes that are safe to use with JAX's threads.

Workers come from a fork server (or are spawned): forking a process in which JAX runs copies locks in their locked state
and hangs sooner or later. They live as long as the run, return batches through shared memory, and end when their parent
does.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any, Protocol

from jaxtrain.data import shared_memory, worker_process
from jaxtrain.data.sample_reader import Next
from jaxtrain.data.sources import ForeignSource
from jaxtrain.errors import DataError, UserError
from jaxtrain.runtime.preemption import SIGNALS

AHEAD = 2  # requests queued at every worker
START_S = 300.0  # extra time for a worker to start and import what the dataset needs
NAP_S = 0.2


class WorkerPool(Protocol):
    """Readers that take messages and answer each of them, in order."""

    workers: int
    ahead: int

    def send(self, worker: int, message: Any) -> None: ...

    def receive(self, worker: int) -> Any:
        """Return the next answer of a worker: a batch, or None at the end of its sequence."""
        ...

    def reading(self) -> str:
        """Describe the samples that are being read, for messages."""
        ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class InlinePool:
    """Reads in the calling thread, when the answer is received."""

    workers = ahead = 1

    def __init__(self, reader: Any):
        self.reader = reader
        self.messages: queue.SimpleQueue = queue.SimpleQueue()
        self.index: int | None = None
        reader.reading = self._at

    def _at(self, index: int) -> None:
        self.index = index

    def send(self, worker: int, message: Any) -> None:
        self.messages.put(message)

    def receive(self, worker: int) -> Any:
        return self.reader(self.messages.get())

    def reading(self) -> str:
        return f"sample {self.index}"

    def start(self) -> None:
        self.messages = queue.SimpleQueue()

    def close(self) -> None: ...


class ProcessPool:
    """Pool of worker processes.

    timeout_s: the longest time for a batch. method: forkserver, spawn or fork. of: the number of workers to report to
    the dataset, if there are only the first few of them. Raises UserError if the dataset cannot be sent to other
    processes, DataError if a worker raises an error, dies or hangs.
    """

    ahead = AHEAD

    def __init__(self, reader: Any, workers: int, timeout_s: float, method: str = "forkserver", of: int | None = None):
        self.of = of or workers
        self.reader, self.workers, self.timeout_s, self.method = reader, workers, timeout_s, method
        self._processes: _WorkerProcesses | None = None

    def start(self) -> None:
        """Start the processes if there are none, and discard outstanding answers of an earlier iteration."""
        if self._processes is None:
            self._processes = _WorkerProcesses(self.reader, self.workers, self.method, self.of)
            weakref.finalize(self, self._processes.close)
        for worker in range(self.workers):
            while self._processes.owed[worker]:
                self.receive(worker)

    def send(self, worker: int, message: Any) -> None:
        self._processes.send(worker, message)

    def receive(self, worker: int) -> Any:
        answer = self._answer(worker)
        if answer[0] == worker_process.END:
            self._processes.sides[worker].give_back(answer[1])
            return None
        return self._processes.sides[worker].read(*answer[1:])

    def _answer(self, worker: int) -> tuple:
        try:
            answer = self._processes.receive(worker, self.timeout_s)
        except BaseException:
            self.close()
            raise
        if answer[0] == worker_process.FAILED:
            self.close()
            raise DataError(f"worker {worker}: {answer[1]}")
        return answer

    def reading(self) -> str:
        return "" if self._processes is None else ", ".join(map(self._processes.at, range(self.workers)))

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None


class _WorkerProcesses:
    """The running processes of a ProcessPool."""

    def __init__(self, reader: Any, workers: int, method: str, of: int):
        refuse_fork(method)
        if method == "forkserver":
            warm_up(reader.source)
        context = multiprocessing.get_context(method)
        self.progress = context.RawArray("q", [-1] * workers)
        self.frozen = None if method == "fork" else freeze(reader)
        self.sides = [shared_memory.ReaderSide() for _ in range(workers)]
        self.owed = [0] * workers
        self.ready = [False] * workers
        self.connections, self.processes = [], []
        atexit.register(self.close)  # runs before multiprocessing's handler, which would send SIGTERM and wait
        for worker in range(workers):
            ours, theirs = context.Pipe()
            carried = reader if self.frozen is None else self.frozen.ticket()
            arguments = (theirs, carried, self.progress, worker, of)
            name = f"jaxtrain-worker-{worker}"
            process = context.Process(target=worker_process.main, args=arguments, name=name, daemon=True)
            with block_signals(), _cpu_children():
                process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def send(self, worker: int, message: Any) -> None:
        self.owed[worker] += 1
        with contextlib.suppress(OSError):  # a dead worker is reported when its answer is asked for
            self.connections[worker].send((message, self.sides[worker].free()))

    def receive(self, worker: int, timeout_s: float) -> tuple:
        if not self.ready[worker]:
            answer = self._wait(worker, timeout_s + START_S)
            if answer[0] != worker_process.READY:
                return answer
            self.ready[worker] = True
            if all(self.ready) and self.frozen is not None:
                self.frozen.close()
        answer = self._wait(worker, timeout_s)
        self.owed[worker] -= 1
        return answer

    def _wait(self, worker: int, timeout_s: float) -> tuple:
        connection, process = self.connections[worker], self.processes[worker]
        deadline = time.monotonic() + timeout_s
        while True:
            wait([connection, process.sentinel], timeout=min(NAP_S, max(0.0, deadline - time.monotonic())))
            if connection.poll():
                try:
                    return worker_process.receive(connection)
                except (EOFError, OSError):
                    raise DataError(self._obituary(worker)) from None
            if not process.is_alive() and not connection.poll():
                raise DataError(self._obituary(worker))
            if time.monotonic() > deadline:
                raise DataError(
                    f"worker {worker} (pid {process.pid}) has been at {self.at(worker)} for more than {timeout_s:g} s "
                    "(data.timeout_s): does the dataset wait for something? Raise data.timeout_s if it is only slow"
                )

    def at(self, worker: int) -> str:
        index = self.progress[worker]
        return f"sample {index}" if index >= 0 else "its start"

    def _obituary(self, worker: int) -> str:
        process = self.processes[worker]
        process.join(5)
        code = process.exitcode or 0
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            hint = "Out of memory? Then lower data.num_workers" if code == -signal.SIGKILL else "Its library crashed"
        else:
            how = f"ended with exit code {code}"
            hint = "Its own words are above"
        if not self.ready[worker]:
            hint += ". A script needs `if __name__ == '__main__':` around the call that trains"
        return f"worker {worker} (pid {process.pid}) {how} at {self.at(worker)}. {hint}"

    def close(self) -> None:
        atexit.unregister(self.close)
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join(5)
        if self.frozen is not None:
            self.frozen.close()


def freeze(reader: Any) -> shared_memory.Frozen:
    """Pickle a reader for worker processes. Raises UserError if it cannot be sent there."""
    source = reader.source
    table = source.reducers() if isinstance(source, ForeignSource) else None
    try:
        frozen = shared_memory.Frozen(reader, table)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        if "through inheritance" in str(error):  # multiprocessing's message for its own objects
            raise UserError(
                f"data.num_workers: the dataset cannot be sent to worker processes: {error}. It holds a Value, Array, "
                "Lock or Queue of multiprocessing; to tell workers a value change a plain attribute in a callback's "
                "on_epoch_end (docs/callbacks.md), or set data.num_workers=0"
            ) from None
        raise UserError(
            f"data.num_workers: the dataset cannot be sent to worker processes: {error}. Define it (and its collate "
            "function) at the top level of a module, open files on first use, or set data.num_workers=0"
        ) from None
    if frozen.of_main and not _main_is_a_file():
        raise UserError(
            f"data.num_workers: the dataset needs `{frozen.of_main[0]}`, which is defined in a notebook or an "
            "interactive session, where worker processes cannot import it: set num_workers=0 (in the DataLoader, or "
            "data.num_workers), or put its definition into a .py file and import it from there"
        )
    return frozen


def _main_is_a_file() -> bool:
    """Return True if another process can import the main script (multiprocessing.spawn.get_preparation_data)."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec is not None or getattr(main, "__file__", None) is not None


def refuse_fork(method: str) -> None:
    """Raise UserError if the start method is fork and forking would copy locks of JAX's or other threads."""
    from jax._src import distributed, xla_bridge

    started = xla_bridge.backends_are_initialized() or distributed.global_state.client is not None
    if method == "fork" and (started or threading.active_count() > 1):
        raise UserError(
            "data.start_method: fork is not safe here, because JAX runs already: its threads hold locks that a forked "
            "child would wait for without end. Use data.start_method=forkserver (or multiprocessing_context="
            "'forkserver' in the DataLoader), or make the Trainer before anything touches JAX"
        )


def warm_up(source: Any) -> None:
    """Start the fork server now, with the modules the source needs preloaded, while the parent does other work."""
    needed = ["torch"] if isinstance(source, ForeignSource) else []
    forkserver.set_forkserver_preload([worker_process.__name__, *needed])
    with block_signals(), _cpu_children():
        forkserver.ensure_running()


@contextlib.contextmanager
def _cpu_children() -> Iterator[None]:
    """Set JAX_PLATFORMS=cpu for processes started in this context, in time for their import of the main script."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block the preemption signals in this context, so that processes started in it have them blocked.

    A job's SIGTERM goes to all of its processes, but the run still needs its workers; they end with their parent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def iterate_epoch(pool: WorkerPool, epoch: int, given: int = 0, place: Any = None) -> Iterator[Any]:
    """Yield the batches of one epoch of a sequence that the workers share, one from each in turn, until all have ended.

    place: for a stream that one worker reads, the place to continue from after `given` batches.
    """
    pool.start()
    active = list(range(pool.workers))
    for i, worker in enumerate(active * pool.ahead):
        pool.send(worker, Next(epoch, worker, pool.workers, i < pool.workers, given, place))
    while active:
        for worker in list(active):
            batch = pool.receive(worker)
            if batch is None:
                active.remove(worker)
                continue
            pool.send(worker, Next(epoch, worker, pool.workers))
            yield batch


def round_robin(pool: WorkerPool, messages: Iterable[Any]) -> Iterator[Any]:
    """Yield the answers to `messages`, in order, read ahead by all workers."""
    pool.start()
    sent = answered = 0
    for message in messages:
        pool.send(sent % pool.workers, message)
        sent += 1
        if sent - answered >= pool.workers * pool.ahead:
            yield pool.receive(answered % pool.workers)
            answered += 1
    while answered < sent:
        yield pool.receive(answered % pool.workers)
        answered += 1
