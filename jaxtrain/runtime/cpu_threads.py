"""Limit the number of threads that XLA's CPU backend computes with."""

import contextlib
import os
import warnings
from collections.abc import Iterator

from jax._src import xla_bridge

from jaxtrain.runtime.gpus import has_gpus

VARIABLE = "NPROC"  # XLA reads it once, when its CPU backend starts


@contextlib.contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Make a backend that starts in this context compute with so many threads; None: one per core.

    For small operations, waiting for a second thread costs more than it saves. The limit holds for the life of the
    process. A backend that has started already keeps its number of threads, with a warning. Does nothing with a GPU, or
    if NPROC is set already, for example by a surrounding `limited`.
    """
    if threads is None or has_gpus() or VARIABLE in os.environ:
        yield
        return
    if xla_bridge.backends_are_initialized():
        if _started_with != [threads]:
            warnings.warn(
                f"shard.threads={threads} has no effect: JAX has started already in this process; "
                f"set {VARIABLE}={threads} in the environment, or build the Trainer before using jax",
                stacklevel=3,
            )
        yield
        return
    os.environ[VARIABLE] = str(threads)
    try:
        yield
    finally:
        del os.environ[VARIABLE]  # the limit is not for child processes
        if xla_bridge.backends_are_initialized():
            _started_with.append(threads)


_started_with: list[int] = []  # the limit with which this process's backend started, if any
