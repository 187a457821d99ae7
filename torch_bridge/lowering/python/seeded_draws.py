"""Find random numbers whose seed forward sets: in torch they are the same at every call, in JAX they would not be."""

import collections
import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torch_bridge.lowering.errors import written_line
from torch_bridge.lowering.python.places import attributes_of

_REPEATS = (
    "in torch the numbers that follow are the same at every call, and JAX draws new ones at every step: draw them once "
    "in __init__ and keep them (self.register_buffer), or draw without your own seed"
)
SEEDS = f"forward seeds the generator that it draws from: {_REPEATS}"
_MARK = 0x5EED_0F_4E0_4E  # a seed that no user code sets
_DEPTH = 6  # module -> its attributes -> submodules -> ... -> an object -> its attributes


class Unseeded:
    """torch's default generator, which a module's own code may not seed.

    by_torch: returns True if torch's own code makes the call, as its checkpoints do.
    """

    def __init__(self, generator: torch.Generator, by_torch: Callable[[], bool]):
        self._generator, self._by_torch = generator, by_torch

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and not self._by_torch():
            raise NotImplementedError(f"forward seeds torch's random numbers: {_REPEATS}")
        return getattr(self._generator, name)


class Draws:
    """User's generators that forward draws from. seeded: lines that draw from one after forward has seeded it, which a
    second record detects: the generators are marked before it."""

    def __init__(self) -> None:
        self.seeded: list[str] = []
        self._states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._marked = False

    def note(self, generator: torch.Generator, frame: Any, by_torch: bool) -> None:
        """Note a draw by user code in a frame, or by torch code that it calls. Raises NotImplementedError for a
        generator that forward makes anew, which only its own variables hold."""
        if not by_torch and not _is_held(generator, frame):
            raise NotImplementedError(f"forward makes the generator that it draws from: {_REPEATS}")
        known = self._states.setdefault(id(generator), (generator, generator.get_state()))[0] is generator
        if self._marked and known and generator.initial_seed() != _MARK:
            self.seeded.append(written_line(frame.f_code, frame.f_lineno))

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """While active, the generators of an earlier record have a marker seed, which is gone once code seeds them."""
        for generator, _ in self._states.values():
            generator.manual_seed(_MARK)
        self._marked = True
        try:
            yield
        finally:
            self._marked = False
            for generator, state in self._states.values():
                generator.set_state(state)


def _is_held(generator: torch.Generator, frame: Any) -> bool:
    """Return True if an object, a closure or a global that the calling code sees holds the generator."""
    waiting: collections.deque[tuple[Any, int]] = collections.deque()
    while frame is not None:
        free = set(frame.f_code.co_freevars)
        own = [value for name, value in frame.f_locals.items() if name in free or value is not generator]
        waiting += [(value, 0) for value in (*own, *frame.f_globals.values())]
        frame = frame.f_back
    seen: dict[int, Any] = {}  # kept alive, so that ids stay unique
    while waiting:
        value, depth = waiting.popleft()
        if value is generator:
            return True
        if id(value) not in seen and depth < _DEPTH:
            seen[id(value)] = value
            waiting += [(inner, depth + 1) for inner in _inside(value)]
    return False


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, (dict, types.MappingProxyType)):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (torch.Tensor, types.ModuleType, types.FunctionType)):
        return ()
    if isinstance(value, type):
        return (vars(value),)
    attributes = attributes_of(value)
    return () if attributes is None else (attributes, type(value))
