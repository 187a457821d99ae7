"""How torch computes a graph while XLA compiles its program: on all cores but one, which is the compiler's."""

import contextlib
import threading
from collections.abc import Iterator

import jax
import torch

from jaxtrain.runtime.background import waits_for_programs

_lock = threading.Lock()
_threads: list[int] = []  # torch's count before, once for each thread inside the context


def must_wait(asked: bool) -> bool:
    """Return True if a program is waited for: the caller has `asked`, or environment or torch ask for the same bits in
    each run, or a GPU computes, beside which torch is no help."""
    asked = asked or waits_for_programs() or torch.are_deterministic_algorithms_enabled()
    return asked or jax.default_backend() != "cpu"


@contextlib.contextmanager
def one_core_less() -> Iterator[None]:
    """Inside the context, let torch compute with one thread less. With as many as cores each operation would end with
    the thread whose core the compiler has, and the others would spin."""
    with _lock:
        _threads.append(_threads[0] if _threads else torch.get_num_threads())
        torch.set_num_threads(max(1, _threads[0] - 1))
    try:
        yield
    finally:
        with _lock:
            before = _threads.pop()
            if not _threads:
                torch.set_num_threads(before)


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Inside the context, torch's generator starts from this seed; after it, it goes on as if nothing were drawn."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        yield
