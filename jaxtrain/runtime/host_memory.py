"""Host memory of this process, as glibc hands it out. Elsewhere these functions do nothing."""

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h


def keep() -> None:
    """Freed memory stays with this process, for whichever thread asks next. Call it before JAX starts its threads.

    XLA's CPU backend allocates a step's temporaries anew in every call. glibc would map them and give them back each
    time, and the system fill every page with zeros: a quarter of a step, in the worst case. A process that has malloc
    settings of its own in the environment (MALLOC_..., GLIBC_TUNABLES) keeps those. Source: mallopt(3).
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(M_ARENA_MAX, 1)  # other threads' arenas end at 64 MB, and map what is larger
        glibc.mallopt(M_MMAP_MAX, 0)
        glibc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def give_back() -> None:
    """What was freed goes back to the system: glibc keeps most of it, thread by thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
