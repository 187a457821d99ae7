"""The process's random generators, which datasets draw from: the one file that seeds, saves and restores them.

They are global, so whoever reads samples in this process holds them (`held`) meanwhile: the threads that read ahead
for training and for evaluation would otherwise draw from each other's seeds.
"""

import contextlib
import operator
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torch_bridge.sources import ForeignSource, RandomState

_lock = [threading.RLock()]
_WORD = 2**64 - 1


class PythonRandom:
    """Python's global generator."""

    get = staticmethod(random.getstate)
    set = staticmethod(random.setstate)
    seed = staticmethod(random.seed)
    same = staticmethod(operator.eq)


class NumpyRandom:
    """numpy's global generator."""

    get = staticmethod(np.random.get_state)
    set = staticmethod(np.random.set_state)

    @staticmethod
    def seed(seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    @staticmethod
    def same(first: tuple, second: tuple) -> bool:
        return first[2:] == second[2:] and np.array_equal(first[1], second[1])


def generators(source: Any) -> list[RandomState]:
    """List the global generators that a source's items may draw from."""
    own = source.random_states() if isinstance(source, ForeignSource) else []
    return [PythonRandom(), NumpyRandom(), *own]


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Be the only one who seeds, draws or restores."""
    with _lock[0]:
        yield


def abandon() -> None:
    """Let others go on although the holder never will: its dataset hangs."""
    _lock[0] = threading.RLock()


@contextlib.contextmanager
def borrowed(states: Sequence[RandomState]) -> Iterator[None]:
    """Hold the generators; afterwards they go on as if nothing had been drawn."""
    with held():
        before = [state.get() for state in states]
        try:
            yield
        finally:
            for state, value in zip(states, before, strict=True):
                state.set(value)


@contextlib.contextmanager
def seeded(source: Any, *numbers: int) -> Iterator[None]:
    """Hold the generators, seeded by `numbers`; afterwards they go on as if nothing had been drawn."""
    states = generators(source)
    with borrowed(states):
        for state in states:
            state.seed(int(mix(*numbers)))
        yield


class Continued:
    """Random numbers that go on from one use to the next, apart from those of the rest of the process."""

    def __init__(self, source: Any):
        self._states = generators(source)
        self._kept: list[Any] | None = None

    @contextlib.contextmanager
    def in_force(self, *seeds: int) -> Iterator[None]:
        """Hold the generators as the last use left them, or seeded anew by `seeds`."""
        with borrowed(self._states):
            for i, state in enumerate(self._states):
                if seeds or self._kept is None:
                    state.seed(int(mix(*seeds)))
                else:
                    state.set(self._kept[i])
            yield
            self._kept = [state.get() for state in self._states]


def mix(*numbers: int | np.ndarray) -> np.ndarray:
    """Return 63-bit numbers that depend on each of `numbers`, which broadcast.

    Source: Steele et al. 2014, SplitMix64.
    """
    value: Any = 0
    for number in numbers:  # plain integers as long as it can be: numpy takes ten times as long for one
        number = number.astype(np.uint64) if isinstance(number, np.ndarray) else int(number)
        value = (value + number + 0x9E3779B97F4A7C15) & _WORD
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
        value = value ^ (value >> 31)
    return np.asarray(value, np.uint64) >> np.uint64(1)
