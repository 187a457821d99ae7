"""A jitted function that compiles once per announced shape, and says what changed when asked to compile again."""

import time
from typing import Any

import jax


class RetraceError(RuntimeError):
    """The compiled step was called with arrays of another shape or dtype."""


class Compiled:
    """Compiles at the first call. batch: the argument whose shapes may vary. shapes: how many different ones may come
    (length buckets); one more raises RetraceError, which names what changed."""

    def __init__(self, jitted: Any, name: str, batch: int, shapes: int = 1):
        self.jitted = jitted
        self.name = name
        self.batch = batch
        self.shapes = shapes
        self.seconds = 0.0
        self._programs: dict[tuple, Any] = {}

    def __call__(self, *arguments):
        signature = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments[self.batch]))
        program = self._programs.get(signature)
        if program is None:
            program = self._compile(signature, arguments)
        return program(*arguments)

    def _compile(self, signature: tuple, arguments: tuple):
        if len(self._programs) >= self.shapes:
            raise RetraceError(self._explain(signature, arguments[self.batch]))
        started = time.perf_counter()
        program = self.jitted.lower(*arguments).compile()
        self.seconds += time.perf_counter() - started
        self._programs[signature] = program
        return program

    @property
    def programs(self) -> list:
        """Compiled programs, for their memory and cost analysis."""
        return list(self._programs.values())

    def _explain(self, signature: tuple, batch: Any) -> str:
        known = next(iter(self._programs))
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
        if len(known) != len(signature):
            return f"{self.name} was compiled for {len(known)} arrays and is called with {len(signature)}"
        changed = [
            f"batch{name}: {old[1]}{list(old[0])} -> {new[1]}{list(new[0])}"
            for name, old, new in zip(names, known, signature, strict=True)
            if old != new
        ]
        return (
            f"{self.name} would compile again, because {'; '.join(changed[:4])}. Every new shape costs a compilation: "
            "pad the data to one shape, or to a few buckets that the source announces"
        )
