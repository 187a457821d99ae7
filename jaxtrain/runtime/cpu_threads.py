"""How many threads compute where XLA runs on a CPU."""

import contextlib
import os
import warnings
from collections.abc import Iterator

from jax._src import xla_bridge

from jaxtrain.runtime.gpus import has_gpus

VARIABLE = "NPROC"  # XLA reads it once, when its CPU backend starts


@contextlib.contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """A backend that starts in here computes with so many threads; None: with one per core.

    Small operations wait longer for a second thread than it saves them. The limit holds for the life of the process,
    so a backend that has started keeps what it has, with a warning. Nothing is changed with a GPU, nor where NPROC is
    set already, as by a surrounding `limited`.
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
        del os.environ[VARIABLE]  # child processes decide for themselves
        if xla_bridge.backends_are_initialized():
            _started_with.append(threads)


_started_with: list[int] = []  # what this process's backend was given, once it is
