"""Pad axes whose length varies between batches to at most eight sizes, so that few shapes are compiled.

The padding value, side and axes of a collate function are found by collating samples of its own dataset, not guessed
from names. Needs no jax.
"""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data import random_state
from jaxtrain.data.collate import Texts, as_array, collate, names_of
from jaxtrain.errors import UserError

PROBED = 8  # samples that are inspected before a run
SMALLEST = 8
FREE = 4  # sizes that are added freely; after that a batch gets a known size that covers it, or a new largest one
MOST_SIZES = 8
MOST_EXACT = 64

Lengths = tuple[int, ...]


class Axis(NamedTuple):
    """An axis whose length varies. group: number of the set of axes that vary together. value: the padding value.
    left: pad in front of the data."""

    name: str
    axis: int
    group: int
    value: Any
    left: bool


class Size(NamedTuple):
    """A shape that is compiled. step: the first step with this shape. rows: samples. lengths: one for each group."""

    step: int
    rows: int
    lengths: Lengths


def ladder(length: int) -> int:
    """Round up to a power of two or 3/4 of one, at least SMALLEST."""
    power = 1 << max(0, math.ceil(math.log2(max(length, 1))))
    return max(SMALLEST, power * 3 // 4 if length <= power * 3 // 4 else power)


def flatten(batch: Any, prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a nested batch by dotted name; texts are left out."""
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, tuple):
        parts = enumerate(batch)
    else:
        return {} if isinstance(batch, Texts) else {prefix: batch}
    found: dict[str, Any] = {}
    for key, value in parts:
        found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def replaced(batch: Any, arrays: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the batch with its arrays replaced by those of `arrays` (dotted name -> array)."""
    inner = lambda key, value: replaced(value, arrays, f"{prefix}.{key}" if prefix else str(key))
    if isinstance(batch, Mapping):
        return {key: inner(key, value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(inner(key, value) for key, value in enumerate(batch))
    return arrays.get(prefix, batch)


class BatchShapes:
    """Pads the batches of one split.

    axes: the axes that vary. exact: leave batches as they are; they may vary along other axes too. full: samples in a
    full batch. steps_per_epoch: after so many steps, no size is added if a known one covers the batch. holds: returns
    True if the model accepts a batch of these shapes, so that no size exceeds the model's maximum length. once: choose
    the sizes anew in every pass over the data, as an evaluation does.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        full: int,
        steps_per_epoch: int,
        holds: Callable[[Mapping[str, Any]], bool] = lambda batch: True,
        once: bool = False,
        exact: bool = False,
    ):
        self.exact = exact
        self.axes, self.full, self.steps_per_epoch, self.holds, self.once = axes, full, steps_per_epoch, holds, once
        self.sizes: list[Size] = []

    def begin(self) -> None:
        """Start a pass over the data."""
        if self.once:
            self.sizes = []

    def state(self) -> list[list]:
        """Return the sizes chosen so far, for a checkpoint."""
        return [[size.step, size.rows, list(size.lengths)] for size in self.sizes]

    def restore(self, state: Sequence[Sequence], step: int) -> None:
        """Restore the sizes that were first used before `step`."""
        self.sizes = [Size(begun, rows, tuple(lengths)) for begun, rows, lengths in state if begun < step]

    def fit(self, step: int, batch: Any) -> Any:
        """Return the batch, padded to the size chosen for it."""
        if self.exact or not self.axes:
            return batch
        arrays = flatten(batch)
        lengths = self.lengths(arrays)
        rows = len(next(iter(arrays.values())))
        size = self._size(step, rows, lengths, arrays)
        return batch if size == lengths else replaced(batch, self.padded(arrays, size))

    def lengths(self, arrays: Mapping[str, Any]) -> Lengths:
        """Return the length of the longest axis of every group."""
        longest = [0] * (1 + max(axis.group for axis in self.axes))
        for axis in self.axes:
            longest[axis.group] = max(longest[axis.group], arrays[axis.name].shape[axis.axis])
        return tuple(longest)

    def padded(self, arrays: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
        """Return the arrays with their varying axes padded to these lengths."""
        made = dict(arrays)
        for name, axis, group, value, left in self.axes:
            missing = lengths[group] - made[name].shape[axis]
            if missing > 0:
                widths = [(0, 0)] * made[name].ndim
                widths[axis] = (missing, 0) if left else (0, missing)
                made[name] = np.pad(made[name], widths, constant_values=value)
        return made

    def _size(self, step: int, rows: int, lengths: Lengths, arrays: Mapping[str, Any]) -> Lengths:
        known = [size.lengths for size in self.sizes if size.rows == rows]
        wanted = self.within(arrays, lengths, tuple(map(ladder, lengths)))
        if wanted in known:
            return wanted
        if not (rows == self.full and step < self.steps_per_epoch and len(known) < FREE):
            covering = [size for size in known if all(a >= b for a, b in zip(size, lengths, strict=True))]
            if covering:
                return min(covering, key=math.prod)
            largest = [max(column) for column in zip(wanted, *(size.lengths for size in self.sizes), strict=True)]
            grew = zip(largest, self._top(), strict=True)
            grown = tuple(_spaced(new, len(self.sizes)) if new > old else new for new, old in grew)
            wanted = self.within(arrays, lengths, grown)
        self.sizes.append(Size(step, rows, wanted))
        return wanted

    def _top(self) -> Lengths:
        """Return the largest length so far of every group; 0 if there is none."""
        groups = range(1 + max(axis.group for axis in self.axes))
        return tuple(max((size.lengths[group] for size in self.sizes), default=0) for group in groups)

    def within(self, arrays: Mapping[str, Any], lengths: Lengths, wanted: Lengths) -> Lengths:
        """Return the wanted lengths, or the largest ones below them that the model accepts."""
        shapes = lambda size: self._shapes(arrays, size)
        if self.holds(shapes(wanted)) or not self.holds(shapes(lengths)):
            return wanted
        found = list(lengths)
        for group, (low, high) in enumerate(zip(lengths, wanted, strict=True)):
            tried = lambda length, group=group: tuple(found[:group] + [length] + list(lengths[group + 1 :]))
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.holds(shapes(tried(middle))) else (low, middle - 1)
            found[group] = low
        return tuple(found)

    def _shapes(self, arrays: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
        """Return arrays of two rows with these lengths. They are broadcast zeros, so they take no memory."""
        made = {}
        for name, array in arrays.items():
            shape = [2, *array.shape[1:]]
            for axis in self.axes:
                if axis.name == name:
                    shape[axis.axis] = max(lengths[axis.group], shape[axis.axis])
            made[name] = np.broadcast_to(np.zeros((), array.dtype), shape)
        return made


def _spaced(length: int, sizes: int) -> int:
    """Round up to a power of two; the last sizes to twice that, so that few more are needed."""
    power = 1 << math.ceil(math.log2(length))
    return power if sizes < MOST_SIZES - 2 else 2 * power


# --- which axes vary, and what pads them ----------------------------------------------------------------------------


def probe(
    source: Any, collating: Callable, items: Callable[[], list[Any]], pad_values: Mapping[str, float]
) -> list[Axis]:
    """Find the axes that vary between samples, by collating samples alone and in pairs.

    items: returns raw samples, as `collating` takes them. pad_values: by name, take precedence over the values found.
    Raises NotPadded if an axis varies and its padding value cannot be determined.
    """
    states = random_state.generators(source)
    before = [state.get() for state in states]
    try:
        given = items()
        together = lambda *chosen: flatten(collating([copy.deepcopy(given[i]) for i in chosen]))
        return axes_of(together, len(given), pad_values)
    finally:
        for state, value in zip(states, before, strict=True):
            state.set(value)


class NotPadded(Exception):
    """Raised if the padding value of an axis cannot be determined; the message says why."""


def axes_of(
    together: Callable[..., dict[str, Any]], count: int, pad_values: Mapping[str, float] = MappingProxyType({})
) -> list[Axis]:
    """Find the axes that vary between samples.

    together: (numbers below count) -> those samples, collated, by name. Raises NotPadded if an axis varies and its
    padding value cannot be determined.
    """
    try:
        alone = [together(i) for i in range(count)]
    except Exception:  # the collate function needs whole batches: pad nothing
        return []
    if len({tuple(arrays) for arrays in alone}) > 1 or len({tuple(a.ndim for a in x.values()) for x in alone}) > 1:
        return []  # the collate function or the step will raise an error that says so
    lengths: dict[tuple[str, int], Lengths] = {}
    for name, array in alone[0].items():
        for axis in range(1, array.ndim):
            found = tuple(arrays[name].shape[axis] for arrays in alone)
            if len(set(found)) > 1:
                lengths[name, axis] = found
    groups = {found: number for number, found in enumerate(dict.fromkeys(lengths.values()))}
    axes: list[Axis] = []
    for name in dict.fromkeys(name for name, _ in lengths):
        own = [axis for key, axis in lengths if key == name]
        values = lengths[name, own[0]]
        short, long = int(np.argmin(values)), int(np.argmax(values))
        small, row = alone[short][name][0], together(short, long)[name][0]
        value, sides = _seen(name, small, row, [axis - 1 for axis in own], pad_values.get(name))
        axes += [
            Axis(name, axis, groups[lengths[name, axis]], value, left) for axis, left in zip(own, sides, strict=True)
        ]
    return axes


def _seen(name: str, small: np.ndarray, row: np.ndarray, axes: Sequence[int], declared: float | None) -> tuple:
    """Find the padding value in the row of a sample that was collated with a longer one, and the side for each axis."""
    candidates = []
    for sides in itertools.product((False, True), repeat=len(axes)):
        inside = [slice(None)] * row.ndim
        for axis, left in zip(axes, sides, strict=True):
            end = row.shape[axis]
            inside[axis] = slice(end - small.shape[axis], end) if left else slice(0, small.shape[axis])
        outside = np.ones(row.shape, bool)
        outside[tuple(inside)] = False
        filling = row[outside]
        same = row[tuple(inside)].shape == small.shape and np.array_equal(row[tuple(inside)], small)
        constant = filling.size > 0 and bool(np.all(filling == filling.flat[0]))
        candidates.append((same, constant, sides, filling.flat[0] if filling.size else None))
    for wanted in ((True, True), (False, True)):  # a collate function that draws random numbers changes the data itself
        for same, constant, sides, value in candidates:
            if (same, constant) == wanted:
                return (value if declared is None else row.dtype.type(declared)), sides
    if declared is not None:
        return row.dtype.type(declared), candidates[0][2]
    raise NotPadded(
        f"`{name}` has samples of different lengths, and the collate function fills them up with more than one value; "
        f"declare one in data.pad_values={{{name}: ...}}"
    )


def collate_of(own: Callable | None, source: Any, config: Any) -> Callable | None:
    """Return the task's own collate function, else a padding one if data.pad_values is set, else None."""
    ragged = own is None and config.data.pad_values and getattr(source, "collate", None) is None
    return PaddingCollate(config.data.pad_values) if ragged else own


class PaddingCollate:
    """Stacks samples of different lengths, padded at the end with the values of data.pad_values."""

    def __init__(self, pad_values: Mapping[str, float]):
        self.pad_values = dict(pad_values)

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        columns = {}
        for key, name in names_of(items[0]):
            values = [as_array(item if key is None else item[key], name) for item in items]
            columns[name] = self._padded(name, values)
        return collate([{name: column[i] for name, column in columns.items()} for i in range(len(items))])

    def _padded(self, name: str, values: list[np.ndarray]) -> list[np.ndarray]:
        shapes = {value.shape for value in values}
        if len(shapes) == 1 or len({len(shape) for shape in shapes}) > 1:
            return values
        if name not in self.pad_values:
            raise UserError(
                f"the dataset is ragged: `{name}` has shapes {', '.join(map(str, sorted(shapes)[:2]))}; declare what "
                f"fills it up in data.pad_values={{{name}: ...}}, or pad it in the Dataset"
            )
        longest = np.max([value.shape for value in values], axis=0)
        fill = self.pad_values[name]
        return [
            np.pad(v, [(0, n - have) for n, have in zip(longest, v.shape, strict=True)], constant_values=fill)
            for v in values
        ]
