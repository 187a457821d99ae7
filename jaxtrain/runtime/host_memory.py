"""Host memory of this process, as glibc hands it out. Elsewhere these functions do nothing."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

from jaxtrain.runtime.gpus import has_gpus

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
DEFAULT_TRIM_THRESHOLD, DEFAULT_MMAP_MAX, NEVER = 128 * 1024, 65536, -1  # mallopt(3)


def one_arena() -> None:
    """Threads share one heap: those of others end at 64 MB, and map what is larger. Before JAX starts its threads."""
    _set(M_ARENA_MAX, 1)


def keep() -> None:
    """Memory freed from now on stays with this process, for whichever thread asks next.

    XLA's CPU backend allocates a step's temporaries anew in every call. glibc would map them and give them back each
    time, and the system fill every page with zeros: a quarter of a step, in the worst case. Nothing is changed with a
    GPU, nor where malloc has settings of its own in the environment (MALLOC_..., GLIBC_TUNABLES). Source: mallopt(3).
    """
    _set(M_MMAP_MAX, 0)
    _set(M_TRIM_THRESHOLD, NEVER)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """As `keep`, and afterwards malloc is as it was."""
    keep()
    try:
        yield
    finally:
        _set(M_MMAP_MAX, DEFAULT_MMAP_MAX)
        _set(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD)
        give_back()


def give_back() -> None:
    """Return freed memory to the system; glibc would keep most of it, in one arena per thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    asked = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if asked or has_gpus():
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(parameter, value)
