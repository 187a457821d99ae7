"""The main loop of a worker process: read the requested samples, hand them over, end when the parent does.

The fork server imports this module first, so it needs no jax.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jaxtrain.data.sample_reader import mix
from jaxtrain.data.shared_memory import Ticket, Writer
from jaxtrain.data.sources import ForeignSource
from jaxtrain.errors import UserError
from jaxtrain.runtime.preemption import SIGNALS

READY, BATCH, END, FAILED = "ready", "batch", "end", "failed"


def main(connection: Connection, frozen: Any, progress: Any, worker: int, workers: int) -> None:
    """Serve (message, free segment) until the parent closes the connection or sends None.

    frozen: a Ticket for the reader, or the reader itself after fork. progress: shared integers; the worker's own says
    which position it reads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its workers
    for number in SIGNALS:  # a preemption of the whole job: the parent saves first, and it kills to end
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a dataset that uses jax.numpy computes on the CPU here
    if "jax" in sys.modules:  # imported by the main script, or by the parent before a fork
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    try:
        reader = frozen.thaw() if isinstance(frozen, Ticket) else frozen
        reader.reading = lambda index: progress.__setitem__(worker, index)
        if isinstance(reader.source, ForeignSource):
            reader.source.enter_worker(worker, workers, int(mix(reader.seed, worker)))
    except BaseException as error:
        _send(connection, (FAILED, explain(error, "cannot start")))
        return
    if _send(connection, (READY,)):
        _serve(connection, reader)


def _serve(connection: Connection, read: Callable[[Any], Any]) -> None:
    writer = Writer()
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return  # the parent is gone
        if request is None:
            return
        message, free = request
        try:
            batch = read(message)
            answer = (END, free) if batch is None else (BATCH, *writer.write(batch, free))
        except BaseException as error:
            answer = (FAILED, explain(error, "failed"))
        if not _send(connection, answer):
            return


def _send(connection: Connection, answer: tuple) -> bool:
    try:
        connection.send(answer)
    except OSError:
        return False
    return True


def explain(error: BaseException, what: str) -> str:
    """The error in words, and where in the user's code its cause was raised."""
    cause = error.__cause__ or error
    words = str(error) if isinstance(error, (UserError, MemoryError)) else f"{what}: {type(error).__name__}: {error}"
    frames = traceback.extract_tb(cause.__traceback__)[-3:]
    where = "".join(f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)
    return words + where
