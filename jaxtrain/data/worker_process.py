"""The main loop of a worker process: read the requested samples, send them to the parent, end when the parent does.

The fork server imports this module first, so it needs no jax.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from jaxtrain.data.random_state import mix
from jaxtrain.data.sample_reader import SequenceReader
from jaxtrain.data.shared_memory import Ticket, Writer
from jaxtrain.data.sources import ForeignSource
from jaxtrain.errors import UserError
from jaxtrain.runtime.preemption import SIGNALS

# These make a stream that shards itself by rank yield all samples: every process takes its rows of the same batches.
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
ONE_PROCESS |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
READY, BATCH, END, FAILED = "ready", "batch", "end", "failed"


def main(connection: Connection, frozen: Any, progress: Any, worker: int, workers: int) -> None:
    """Serve requests (message, free segment) until the parent closes the connection or sends None.

    frozen: a Ticket for the reader, or the reader itself after fork. progress: shared integers, one per worker: the
    position that it is reading.
    """
    threading.Thread(target=_end_with_parent, name="jaxtrain-parent", daemon=True).start()
    for number in SIGNALS:  # sent to the whole job, or Ctrl-C: the parent saves first, then kills its workers
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a dataset that uses jax.numpy computes on the CPU here
    if "jax" in sys.modules:  # imported by the main script, or by the parent before a fork
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    try:
        reader = frozen.thaw() if isinstance(frozen, Ticket) else frozen
        if isinstance(reader, SequenceReader) and reader.whole:
            os.environ.update({name: value for name, value in ONE_PROCESS.items() if name in os.environ})
        reader.reading = lambda index: progress.__setitem__(worker, index)
        if isinstance(reader.source, ForeignSource):
            of_all = (0, 1) if isinstance(reader, SequenceReader) and reader.in_shards else (worker, workers)
            reader.source.enter_worker(*of_all, int(mix(reader.seed, worker)))
    except BaseException as error:
        _send(connection, (FAILED, explain(error, "cannot start")))
        return
    if _send(connection, (READY,)):
        _serve(connection, reader)


def _end_with_parent() -> None:
    """Exit when the parent does, even while a sample never finishes, for example waiting for the network."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
        handle = None
        try:
            batch = read(message)
            if batch is None:
                answer = (END, free)
            else:
                number, handle, spans = writer.write(batch, free)
                answer = (BATCH, number, handle, spans)
        except BaseException as error:
            answer = (FAILED, explain(error, "failed"))
        if not _send(connection, answer, handle):
            return


def _send(connection: Connection, answer: tuple, handle: int | None = None) -> bool:
    """Send an answer, and the descriptor of a new segment, which is then closed. Return False if the parent is gone."""
    try:
        connection.send(answer)
        if handle is not None:
            reduction.send_handle(connection, handle, os.getppid())
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def receive(connection: Connection) -> tuple:
    """Receive an answer of `_send` in the parent; a BATCH's descriptor is one of the parent's own."""
    answer = connection.recv()
    if answer[0] != BATCH or answer[2] is None:
        return answer
    return (*answer[:2], reduction.recv_handle(connection), *answer[3:])


def explain(error: BaseException, what: str) -> str:
    """Return the text of an error, and where its cause was raised (the last three frames)."""
    cause = error.__cause__ or error
    words = str(error) if isinstance(error, (UserError, MemoryError)) else f"{what}: {type(error).__name__}: {error}"
    frames = traceback.extract_tb(cause.__traceback__)[-3:]
    where = "".join(f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)
    return words + where
