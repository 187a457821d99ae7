"""A jitted function that compiles once per announced shape, and raises an error that says what changed after that."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime.waits import Waits
from jaxtrain.train.compilation import flops
from jaxtrain.train.compilation.out_of_memory import OutOfMemoryError, is_out_of_memory


class RetraceError(UserError):
    """The compiled step was called with arrays of another shape or dtype."""

    exit_code = 1


class Compiled:
    """Jitted function, compiled at its first call and for each new shape of one argument.

    batch: index of the argument whose shapes may vary. shapes: how many different shapes are allowed (length buckets);
    one more raises RetraceError, which names what changed, as does a change in any other argument. out_of_memory:
    (arguments, program or None) -> message for an out-of-memory error.
    """

    def __init__(
        self,
        jitted: Any,
        name: str,
        batch: int,
        shapes: int = 1,
        out_of_memory: Callable[[tuple, Any], str] | None = None,
    ):
        self.jitted = jitted
        self.name = name
        self.batch = batch
        self.shapes = shapes
        self.out_of_memory = out_of_memory
        self.seconds = self.last_s = 0.0  # time of all compilations, and of the last one
        self.flops: float | None = None  # of one call, over all devices; known once compiled
        self._waits = Waits(name, lambda frame: "")
        self._programs: dict[tuple, Any] = {}
        self._first: tuple[Any, ...] = ()  # shapes and dtypes of the first call

    def prepare(self, *arguments) -> None:
        """Compile what a call with these arguments would compile; this may take long. The arguments stay unchanged."""
        signature = self._signature(arguments)
        if signature not in self._programs:
            with self._waits.during("is compiled"):
                self._guarded(None, lambda: self._compile(signature, arguments), arguments)

    def knows(self, *arguments) -> bool:
        """Return True if a call with these arguments needs no compilation."""
        return self._signature(arguments) in self._programs

    def __call__(self, *arguments):
        self.prepare(*arguments)
        program = self._programs[self._signature(arguments)]
        return self._guarded(program, lambda: program(*arguments), arguments)

    def _signature(self, arguments: tuple) -> tuple:
        return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments[self.batch]))

    def _guarded(self, program: Any, work: Callable[[], Any], arguments: tuple) -> Any:
        """Call `work`; turn out-of-memory and wrong-shape errors into UserErrors that explain them."""
        try:
            return work()
        except jax.errors.JaxRuntimeError as error:
            if self.out_of_memory is None or not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(self.out_of_memory(arguments, program)) from error
        except TypeError as error:  # JAX's, for arrays that the program was not compiled for
            changed = self._differences(arguments) if self._programs else []
            if not changed:
                raise
            raise RetraceError(self._explain(changed)) from error

    def _compile(self, signature: tuple, arguments: tuple):
        if len(self._programs) >= self.shapes:
            raise RetraceError(self._explain(self._differences(arguments)))
        started = time.perf_counter()
        traced = self.jitted.trace(*arguments)
        lowered = traced.lower()
        program = lowered.compile()
        self.last_s = time.perf_counter() - started
        self.seconds += self.last_s
        self.flops = self.flops or flops.count(traced.jaxpr.jaxpr)
        self._first = self._first or jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
        self._programs[signature] = program
        return program

    def program(self, *arguments) -> Any:
        """Return the compiled program for these arguments."""
        return self._programs[self._signature(arguments)]

    @property
    def programs(self) -> list:
        """Return the compiled programs, for memory and cost analysis."""
        return list(self._programs.values())

    def _differences(self, arguments: tuple) -> list[str]:
        """Describe how arguments differ from the first call's: "batch['image']: float32[8, 1] -> float32[4, 1]"."""
        changed = []
        for name, old, new in zip(_names(self.jitted, len(arguments)), self._first, arguments, strict=True):
            known = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(old)[0]}
            given = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(new)[0]}
            for key in [*known, *(key for key in given if key not in known)]:
                before, after = _describe(known.get(key)), _describe(given.get(key))
                if before != after:
                    changed.append(f"{name}{key}: {before} -> {after}")
        return changed

    def _explain(self, changed: list[str]) -> str:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        return (
            f"{self.name} would compile again, because {'; '.join(changed[:4])}{more}. Every new shape costs a "
            "compilation: pad the data to one shape, or to a few buckets that the source announces; a Trainer of your "
            "own model takes more of them with data.shapes=exact"
        )


def _names(jitted: Any, count: int) -> list[str]:
    names = [p.name for p in inspect.signature(jitted).parameters.values() if p.kind != p.VAR_POSITIONAL]
    return names if len(names) == count else [f"argument {i}" for i in range(count)]


def _describe(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
