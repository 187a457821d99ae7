"""Pad batches of many lengths, in the drop-ins, up to at most eight shapes if that does not change the result.

Works as `data.shapes: auto` of the Trainer does. The padding values are learned by collating samples of the data set;
that more padding changes neither loss nor gradients is checked on one batch, in torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxtrain.data import random_state
from jaxtrain.data.batch_shapes import MOST_SIZES, PROBED, BatchShapes, NotPadded, axes_of, flatten, ladder, replaced
from jaxtrain.errors import UserError

LOSS, GRADIENT = 1e-5, 1e-4  # largest relative differences due to rounding
MOST = 64  # most shapes of batches that are not rounded up

Value = tuple[float, Mapping[str, np.ndarray]]  # a loss and its gradients


class RoundedLengths:
    """Padding of one run's batches to few shapes; `learn` examines the data set first.

    tell: receives one line about how batches vary, once that is known.
    """

    def __init__(self, tell: Callable[[str], None]):
        self.tell, self.step = tell, 0
        self.seen: set[tuple] = set()
        self.shapes: BatchShapes | None = None

    def learn(
        self,
        dataset: Any,
        collate: Callable,
        rows: int,
        steps: int,
        value: Callable[[Any], Value],
        generators: Sequence[Any],
    ) -> None:
        """Find out if batches vary in length, and if more padding leaves the result unchanged.

        dataset, collate: as in a DataLoader. rows: samples per batch. steps: batches per epoch. value: batch -> loss
        and gradients in evaluation mode. generators: random states that the data set may draw from; restored.
        """
        from torch_bridge.training.eager_value import unnoticed

        with random_state.borrowed([*random_state.generators(None), *generators]):
            line = unnoticed(dataset, collate, lambda: self._choose(dataset, collate, rows, steps, value))
        if line:
            self.tell(line)

    def fit(self, batch: Any) -> Any:
        """Return the batch, padded to its rounded shape if lengths were learned.

        Raises UserError if more than 64 shapes come unpadded.
        """
        if self.shapes is not None:
            self.step += 1
            return _nested(self.shapes.fit(self.step - 1, _tuples(batch)), batch)
        shape = tuple(getattr(array, "shape", ()) for array in flatten(_tuples(batch)).values())
        if shape not in self.seen:
            self.seen.add(shape)  # the compiled step warns at the eighth
            if len(self.seen) > MOST:
                raise UserError(f"batches have come in more than {MOST} shapes, each of which is compiled: pad them")
        return batch

    def _choose(self, dataset: Any, collate: Callable, rows: int, steps: int, value: Callable[[Any], Value]) -> str:
        """Choose the shapes if padding changes nothing. Return a line about it; "" if batches have a single length."""
        items = [dataset[int(i)] for i in np.unique(np.linspace(0, len(dataset) - 1, PROBED).astype(int))]
        two = lambda *chosen: _tuples(collate([_copy(items[i]) for i in chosen]))
        if not all(hasattr(leaf, "ndim") for leaf in flatten(two(0)).values()):
            return ""
        try:
            axes = axes_of(lambda *chosen: flatten(two(*chosen)), len(items))
        except NotPadded as reason:
            return f"{str(reason).partition(';')[0]}: every shape of a batch is compiled"
        if not axes:
            return ""
        names = ", ".join(dict.fromkeys(axis.name for axis in axes))
        plain = collate([_copy(item) for item in items[:2]])
        holds = lambda arrays: _runs(lambda: value(_nested(replaced(_tuples(plain), arrays), plain)))
        shapes = BatchShapes(axes, rows, steps, holds)
        reason = _dependence(shapes, plain, value)
        if reason is None:
            self.shapes = shapes
            return f"batches come in many lengths ({names}), which are rounded up to at most {MOST_SIZES} shapes"
        return f"padding changes the result ({reason}), so every length of {names} is compiled in its own shape"


def _dependence(shapes: BatchShapes, plain: Any, value: Callable[[Any], Value]) -> str | None:
    """Describe how more padding changes a batch's loss or gradients; return None if it does not."""
    arrays = flatten(_tuples(plain))
    lengths = shapes.lengths(arrays)
    further = shapes.within(arrays, lengths, tuple(ladder(length + 1) for length in lengths))
    if further == lengths:
        return None  # the model takes no longer input
    before, grads = value(plain)
    after, padded = value(_nested(replaced(_tuples(plain), shapes.padded(arrays, further)), plain))
    if not abs(before - after) <= LOSS * max(abs(before), 1e-3):
        return f"a loss of {before:.6g} becomes {after:.6g}"
    largest = max((float(np.abs(grad).max(initial=0)) for grad in grads.values()), default=0.0)
    for name, grad in grads.items():
        error = float(np.abs(grad - padded[name]).max(initial=0))
        if not error <= GRADIENT * max(largest, 1e-6):
            return f"the gradient of {name} differs by {error:.2g}"
    return None


def _runs(call: Callable) -> bool:
    try:
        call()
    except (IndexError, RuntimeError, ValueError):  # longer than the model's position table
        return False
    return True


def _copy(item: Any) -> Any:
    """Copy a sample's outer dict or list, which a collate function may change."""
    if isinstance(item, Mapping):
        return dict(item)
    return list(item) if isinstance(item, list) else item


def _tuples(batch: Any) -> Any:
    """Return the batch with tuples in place of lists, dicts in place of other mappings, arrays in place of tensors."""
    from torch_bridge.datasets import to_numpy

    return _plain(to_numpy(batch))


def _plain(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return tuple(map(_plain, batch))
    return batch


def _nested(batch: Any, like: Any) -> Any:
    """Return the batch with the container types of `like`."""
    if isinstance(like, Mapping):
        inner, kind = {key: _nested(batch[key], like[key]) for key in like}, type(like)
        return inner if kind is dict else cast(Callable, kind)(inner)
    if isinstance(like, (list, tuple)) and not hasattr(like, "_fields"):
        return type(like)(_nested(a, b) for a, b in zip(batch, like, strict=True))
    return batch
