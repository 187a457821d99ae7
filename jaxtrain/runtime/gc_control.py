"""Python's search for reference cycles, where it would find next to none."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Without a search for cycles, which starts by the number of new objects: tracing makes them by the million and
    keeps most. What is no longer referred to is freed as ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
