"""Tune how glibc's malloc manages this process's host memory. Without glibc, these functions do nothing."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

from jaxtrain.runtime.gpus import has_gpus

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
DEFAULT_TRIM_THRESHOLD, DEFAULT_MMAP_MAX, NEVER = 128 * 1024, 65536, -1  # mallopt(3)


def one_arena() -> None:
    """Make all threads share one heap: other arenas end at 64 MB and map larger blocks. Call before JAX starts."""
    _set(M_ARENA_MAX, 1)


def keep() -> None:
    """Keep memory that is freed from now on in this process, for reuse by any thread.

    XLA's CPU backend allocates a step's temporaries anew in every call. glibc would map and unmap them each time, and
    the system would zero every page: a quarter of a step, in the worst case. Does nothing with a GPU, nor if the
    environment has settings for malloc (MALLOC_..., GLIBC_TUNABLES). Source: mallopt(3).
    """
    _set(M_MMAP_MAX, 0)
    _set(M_TRIM_THRESHOLD, NEVER)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Apply `keep` in this context, then restore malloc's defaults and release freed memory."""
    keep()
    try:
        yield
    finally:
        _set(M_MMAP_MAX, DEFAULT_MMAP_MAX)
        _set(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD)
        give_back()


def give_back() -> None:
    """Return freed memory to the system; glibc would keep most of it, in an arena for each thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    asked = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if asked or has_gpus():
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(parameter, value)
