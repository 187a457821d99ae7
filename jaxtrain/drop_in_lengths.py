"""Batches of many lengths in the drop-ins: rounded up to at most eight shapes where that changes nothing.

As `data.shapes: auto` of the Trainer. What a collate function pads with is seen from what it does to samples of the
data set; that more of it changes neither loss nor gradients is seen from one batch, in torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxtrain.data import random_state
from jaxtrain.data.batch_shapes import MOST_SIZES, PROBED, BatchShapes, NotPadded, axes_of, flatten, ladder, replaced
from jaxtrain.errors import UserError

LOSS, GRADIENT = 1e-5, 1e-4  # relative differences that rounding explains
MOST = 64  # shapes of batches that are left as they are

Value = tuple[float, Mapping[str, np.ndarray]]  # a loss and its gradients


class RoundedLengths:
    """Brings the batches of one run to few shapes; `learn` says of which data set they are.

    tell: gets one line when it is known how batches come.
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
        """Find out if batches vary in length, and if more padding changes nothing.

        dataset, collate: as a DataLoader has them. rows, steps: of a batch, of an epoch. value: gives a batch's loss
        and gradients in evaluation mode. generators: random states that the data set may draw from, left as they were.
        """
        from torch_bridge.training.eager_value import unnoticed

        with random_state.borrowed([*random_state.generators(None), *generators]):
            line = unnoticed(dataset, collate, lambda: self._choose(dataset, collate, rows, steps, value))
        if line:
            self.tell(line)

    def fit(self, batch: Any) -> Any:
        """The batch, in arrays, at the size that it gets."""
        if self.shapes is not None:
            self.step += 1
            return _nested(self.shapes.fit(self.step - 1, _tuples(batch)), batch)
        shape = tuple(getattr(array, "shape", ()) for array in flatten(_tuples(batch)).values())
        if shape not in self.seen:
            self.seen.add(shape)  # the step tells of the eighth
            if len(self.seen) > MOST:
                raise UserError(f"batches have come in more than {MOST} shapes, each of which is compiled: pad them")
        return batch

    def _choose(self, dataset: Any, collate: Callable, rows: int, steps: int, value: Callable[[Any], Value]) -> str:
        """Choose shapes, if that changes nothing. Gives the line that says how batches come; "" for of one length."""
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
    """How loss and gradients of a batch differ from those of the same batch padded further; None where they do not."""
    arrays = flatten(_tuples(plain))
    lengths = shapes.lengths(arrays)
    further = shapes.within(arrays, lengths, tuple(ladder(length + 1) for length in lengths))
    if further == lengths:
        return None  # the model takes nothing longer
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
    except (IndexError, RuntimeError, ValueError):  # a table of positions ends
        return False
    return True


def _copy(item: Any) -> Any:
    """A sample whose containers a collate function may change."""
    if isinstance(item, Mapping):
        return dict(item)
    return list(item) if isinstance(item, list) else item


def _tuples(batch: Any) -> Any:
    """The batch with tuples in place of lists, dicts in place of other mappings, arrays in place of tensors."""
    from torch_bridge.datasets import to_numpy

    return _plain(to_numpy(batch))


def _plain(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return tuple(map(_plain, batch))
    return batch


def _nested(batch: Any, like: Any) -> Any:
    """The batch with the containers of `like`."""
    if isinstance(like, Mapping):
        inner, kind = {key: _nested(batch[key], like[key]) for key in like}, type(like)
        return inner if kind is dict else cast(Callable, kind)(inner)
    if isinstance(like, (list, tuple)) and not hasattr(like, "_fields"):
        return type(like)(_nested(a, b) for a, b in zip(batch, like, strict=True))
    return batch
