"""Seed, save and restore the process's global random generators that datasets draw from; no other file does.

The generators are global, so one thread at a time owns them. A thread that reads samples in this process holds them
(`held`) during every batch. If the dataset draws random numbers, the thread that consumes its batches owns them
whenever it isn't waiting for a batch. So the threads that read for training and for evaluation, and the user's own
code, never draw from each other's seeds.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from torch_bridge.sources import ForeignSource, RandomState

_WORD = 2**64 - 1


class PythonRandom:
    """Python's global generator."""

    get = staticmethod(random.getstate)
    set = staticmethod(random.setstate)
    seed = staticmethod(random.seed)

    @staticmethod
    def same(first: tuple, second: tuple) -> bool:
        return first == second


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
    process: list[RandomState] = [PythonRandom(), NumpyRandom()]
    return process + (source.random_states() if isinstance(source, ForeignSource) else [])


class Ownership:
    """A lock that a thread may hold beyond a block of code, and that any thread may release for it."""

    def __init__(self):
        self._changed = threading.Condition()
        self._owner: int | None = None  # identifier of a thread
        self._depth = 0  # nested `held` blocks
        self._claims: set[object] = set()  # consumers that own the lock between two batches
        self._waiting = 0  # waiting consumers; they go before readers, which would otherwise never stop reading

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._take(lambda me: self._owner == me or (self._owner is None and not self._waiting))
        self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                self._free()

    def claim(self, consumer: object) -> None:
        if consumer in self._claims and self._owner == threading.get_ident():
            return
        self._waiting += 1
        try:
            self._take(lambda me: self._owner in (None, me))
            self._claims.add(consumer)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def drop(self, consumer: object) -> None:
        with self._changed:
            self._claims.discard(consumer)
            self._free()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        with self._changed:
            mine = self._owner == threading.get_ident() and not self._depth
            claims = self._claims if mine else set()
            if mine:
                self._claims = set()
                self._free()
        try:
            yield
        finally:
            for consumer in claims:
                self.claim(consumer)

    def _take(self, free: Callable[[int], bool]) -> None:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: free(me))
            self._owner = me

    def _free(self) -> None:
        if not self._depth and not self._claims:
            self._owner = None
            self._changed.notify_all()


_ownership = [Ownership()]


def held() -> contextlib.AbstractContextManager:
    """Hold the generators for a block of code: no other thread seeds, draws or restores meanwhile."""
    return _ownership[0].held()


def claim(consumer: object) -> None:
    """Make this thread own the generators until it waits for a batch (`released`) or `drop`s its claim."""
    _ownership[0].claim(consumer)


def drop(consumer: object) -> None:
    """Give up a claim, from any thread."""
    _ownership[0].drop(consumer)


def released() -> contextlib.AbstractContextManager:
    """Let other threads hold the generators for a block of code in which this thread draws nothing."""
    return _ownership[0].released()


def abandon() -> None:
    """Replace the lock, so that other threads go on although the holder's dataset hangs."""
    _ownership[0] = Ownership()


@contextlib.contextmanager
def borrowed(states: Sequence[RandomState]) -> Iterator[None]:
    """Hold the generators for a block of code and restore their states afterwards."""
    with held():
        before = [state.get() for state in states]
        try:
            yield
        finally:
            for state, value in zip(states, before, strict=True):
                state.set(value)


@contextlib.contextmanager
def seeded(source: Any, *numbers: int) -> Iterator[None]:
    """Hold the generators, seeded by `numbers`, for a block of code and restore their states afterwards."""
    states = generators(source)
    with borrowed(states):
        for state in states:
            state.seed(int(mix(*numbers)))
        yield


class Continued:
    """Random generator states that continue from one use to the next, separate from the rest of the process."""

    def __init__(self, source: Any):
        self._states = generators(source)
        self._kept: list[Any] | None = None
        self._begun: list[Any] = []
        self.moved = False  # True if anything was drawn since the generators were seeded

    @contextlib.contextmanager
    def in_force(self, *seeds: int) -> Iterator[None]:
        """Hold the generators in the states that the last use left, or seeded anew by `seeds`."""
        with borrowed(self._states):
            for i, state in enumerate(self._states):
                if seeds or self._kept is None:
                    state.seed(int(mix(*seeds)))
                else:
                    state.set(self._kept[i])
            if seeds or self._kept is None:
                self._begun, self.moved = [state.get() for state in self._states], False
            yield
            self._kept = [state.get() for state in self._states]
            pairs = zip(self._states, self._begun, self._kept, strict=True)
            self.moved = self.moved or not all(state.same(begun, kept) for state, begun, kept in pairs)


def mix(*numbers: int | np.ndarray) -> np.ndarray:
    """Return 63-bit numbers that depend on each of `numbers`, which broadcast.

    Source: Steele et al. 2014, SplitMix64.
    """
    value: Any = 0
    for number in numbers:  # plain integers where possible: numpy takes ten times as long for a scalar
        number = number.astype(np.uint64) if isinstance(number, np.ndarray) else int(number)
        value = (value + number + 0x9E3779B97F4A7C15) & _WORD
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
        value = value ^ (value >> 31)
    return np.asarray(value, np.uint64) >> np.uint64(1)
