"""Collate items into one batch of numpy arrays, by the rules of torch's default_collate."""

import functools
import numbers
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.widths import narrow
from jaxtrain.errors import UserError

_PLAIN_NUMBERS = {bool, int, float}
_TEXT = (str, bytes, pathlib.PurePath)
Empty = Callable[[tuple[int, ...], Any], np.ndarray]  # as np.empty


def collate(items: Sequence[Any], empty: Empty = np.empty) -> dict[str, Any]:
    """Stack items into a dict: a mapping keeps its keys, a tuple gets "0", "1", ..., a single array is "0".

    empty: allocates arrays, like np.empty. Raises UserError, naming the key and the shapes, if the items do not fit
    together or are not numeric.
    """
    if isinstance(items[0], (tuple, list)):
        _check_lengths(items[0], items, "an item")
    parts = lambda key, name: items if key is None else _parts(items, key, name)
    return {name: stack(parts(key, name), name, empty) for key, name in names_of(items[0])}


def names_of(item: Any) -> list[tuple[Any, str]]:
    """Return (key in an item, name in the batch) for each part of an item; the key None is the item itself."""
    if isinstance(item, Mapping):
        return [(key, str(key)) for key in item]
    if isinstance(item, (tuple, list)):
        names = getattr(item, "_fields", range(len(item)))
        return [(i, str(name)) for i, name in enumerate(names)]
    return [(None, "0")]


class Texts(list):
    """The strings or paths of a batch, one per sample, a list as in torch. They stay on the host."""


def is_tensor(value: Any) -> bool:
    """Return True if a value is a torch.Tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_large(value: Any) -> bool:
    """Return True if an array or tensor is large enough to be copied into its row at once."""
    if not is_tensor(value):
        return getattr(value, "nbytes", 0) >= LARGE
    from torch_bridge.datasets.convert import is_dense

    return is_dense(value) and value.nbytes >= LARGE


def as_array(value: Any, name: str = "0") -> np.ndarray:
    """Return a value as an array, without a copy if possible.

    Raises UserError, naming the value, unless it is a number, an array, a tensor or nested lists of numbers.
    """
    if isinstance(value, np.ndarray):
        return value
    if is_tensor(value):
        from torch_bridge.datasets.convert import to_numpy

        try:
            return to_numpy(value)
        except UserError as error:
            raise UserError(f"the dataset's `{name}`: {error}") from None
    kept = isinstance(value, (numbers.Number, np.generic, list, tuple))
    if not kept and not (hasattr(value, "__array__") and hasattr(value, "dtype")):  # a PIL picture has no dtype
        raise _no_number(value, name)
    return np.asarray(value)


def _join(first: Any, values: Sequence[Any], empty: Empty) -> np.ndarray | None:
    """Join plain numbers or tensors into one array [batch, ...]; None for values that need `as_array` each."""
    if set(map(type, values)) <= _PLAIN_NUMBERS:
        return np.array(values)
    if is_tensor(first):
        from torch_bridge.datasets.convert import join

        return join(values, empty)
    return None


# key in an item (None: the item itself), name in the batch, rows, and the shape and dtype of every further array
_Column = tuple[Any, str, Any, tuple[int, ...] | None, np.dtype | None]
LARGE = 96 * 1024  # bytes of a tensor


class Columns:
    """Collates `size` items that are appended one by one; the batch and the errors are those of `collate`.

    A large array is copied into its row at once, while the CPU caches hold it, so that its memory can serve the next
    item. Items of small tensors and numbers are kept and joined at the end, which is less work per item. empty:
    allocates the batch's arrays. keep: keep the items whose arrays are copied, as `kept`.
    """

    def __init__(self, size: int, empty: Empty = np.empty, keep: bool = False):
        self.size = size
        self.empty = empty
        self.kept: list[Any] | None = [] if keep else None
        self._waiting: list[Any] = []
        self._count = 0
        self._columns: list[_Column] = []
        self._first: Any = None

    def append(self, item: Any) -> None:
        row = self._count
        if row and self._first is not None:
            _check_lengths(self._first, [item], "an item")
        if not row:
            self._first = item if isinstance(item, (tuple, list)) else None
            columns = [self._column(key, name, item if key is None else item[key]) for key, name in names_of(item)]
            if all(shape is None for *_, shape, _ in columns):
                self.append = self._waiting.append  # from now on: a plain list append per small sample is fastest
                self.append(item)
                return
            self._columns = columns
        self._count += 1
        if self.kept is not None:
            self.kept.append(item)
        for i, (key, name, rows, shape, dtype) in enumerate(self._columns):
            value = item if key is None else _part(item, key, name)
            if shape is None:
                rows.append(value)
                continue
            array = as_array(value, name)
            if type(array) is np.ndarray and array.shape == shape and array.dtype == dtype:
                rows[row] = array
            else:  # `stack` will join them or raise an error
                self._columns[i] = key, name, [*rows[:row], value], None, None

    def _column(self, key: Any, name: str, first: Any) -> _Column:
        if type(first) is np.ndarray or _is_large(first):
            array = as_array(first, name)
            if type(array) is np.ndarray and array.ndim and array.dtype.isnative and _is_number(array.dtype):
                return key, name, self.empty((self.size, *array.shape), array.dtype), array.shape, array.dtype
        return key, name, [], None, None

    def batch(self) -> dict[str, Any]:
        """Return the collated batch. Raises UserError as `collate` does."""
        if self._waiting:
            return collate(self._waiting, self.empty)
        joined = lambda rows, name, shape: stack(rows, name, self.empty) if shape is None else narrow(rows)
        return {name: joined(rows, name, shape) for _, name, rows, shape, _ in self._columns}


class Named:
    """Wraps a torch-style collate function; its result is named as by `collate`.

    The arrays are copies, because the function may reuse its tensors for the next batch. function: None if the items
    are a batch already.
    """

    def __init__(self, function: Callable[[Any], Any] | None):
        self.function = function

    def __call__(self, items: Any) -> dict[str, Any]:
        return as_batch(items if self.function is None else self.function(items))


def as_batch(value: Any) -> dict[str, Any]:
    """Convert the result of a torch-style collate function to a dict of arrays, named as by `collate`."""
    if hasattr(value, "_fields"):
        value = dict(zip(value._fields, value, strict=True))
    elif isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        value = {"0": value}
    return {str(key): _narrow_all(inner, str(key)) for key, inner in value.items()}


def _narrow_all(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _narrow_all(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, (tuple, list)) and value and all(isinstance(inner, _TEXT) for inner in value):
        return Texts(value)
    if isinstance(value, (tuple, list)) and value and not isinstance(value[0], numbers.Number):
        return tuple(_narrow_all(inner, f"{name}.{i}") for i, inner in enumerate(value))
    array = as_array(value, name)
    if not _is_number(array.dtype):
        raise _no_number(value, name)
    narrowed = narrow(array)
    return array.copy() if narrowed is array else narrowed


def stack(values: Sequence[Any], name: str, empty: Empty = np.empty) -> Any:
    """Stack values into one array [batch, ...]; nested mappings and sequences stay nested, strings become `Texts`.

    int64 becomes int32, float64 float32. Source: torch.utils.data.default_collate.
    """
    first = values[0]
    if isinstance(first, Mapping):
        return {str(key): stack(_parts(values, key, f"{name}.{key}"), f"{name}.{key}", empty) for key in first}
    if isinstance(first, (tuple, list)):
        _check_lengths(first, values, f"`{name}`")
        return tuple(stack(_parts(values, i, f"{name}.{i}"), f"{name}.{i}", empty) for i in range(len(first)))
    if isinstance(first, _TEXT) and all(isinstance(value, _TEXT) for value in values):
        return Texts(values)
    joined = _join(first, values, empty)
    if joined is not None and _is_number(joined.dtype):
        return narrow(joined)
    arrays = [as_array(value, name) for value in values]
    if len({array.shape for array in arrays}) > 1:
        shapes = list(dict.fromkeys(array.shape for array in arrays))
        raise UserError(
            f"the dataset is ragged: `{name}` has shape {list(shapes[0])} in one item and {list(shapes[1])} in "
            "another; pad them in the Dataset, or give the task a collate function"
        )
    odd = {array.dtype for array in arrays if not _is_number(array.dtype)}
    if odd:
        raise _no_number(next(v for v, array in zip(values, arrays, strict=True) if array.dtype in odd), name)
    shape = arrays[0].shape
    if not shape:
        return narrow(np.array(arrays))
    return narrow(np.concatenate(arrays).reshape(len(arrays), *shape))  # faster than np.stack


def _parts(items: Sequence[Any], key: Any, name: str) -> list[Any]:
    try:
        return [item[key] for item in items]
    except (LookupError, TypeError):
        return [_part(item, key, name) for item in items]  # raises an error that names the item


def _check_lengths(first: Sequence[Any], values: Sequence[Any], what: str) -> None:
    for value in values:
        if isinstance(value, (tuple, list)) and len(value) != len(first):
            raise UserError(
                f"the dataset is ragged: {what} is a {_described(first)} in one sample and a {_described(value)} in "
                "another; return as many in every sample, or give the task a collate function"
            )


def _part(item: Any, key: Any, name: str) -> Any:
    try:
        return item[key]
    except (LookupError, TypeError):
        kind = f"has the keys {', '.join(map(str, item))}" if isinstance(item, Mapping) else f"is a {_described(item)}"
        raise UserError(
            f"the dataset is ragged: one item has `{name}` and another has not: it {kind}; return the same in every "
            "item, or give the task a collate function"
        ) from None


def _described(item: Any) -> str:
    return f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list)) else type(item).__name__


def _no_number(value: Any, name: str) -> UserError:
    kind = type(value).__name__
    if value is None:
        fix = "return a number that stands for `missing` (-100, nan), leave the key out, or filter such samples"
    elif type(value).__module__.startswith("PIL."):
        fix = "turn the picture into an array or tensor in the Dataset (torchvision's ToTensor, numpy.asarray)"
    else:
        fix = "convert it in the Dataset or the collate function, an object to a dict or tuple of its tensors"
    return UserError(f"the dataset returns {kind} for `{name}`, wanted numbers, arrays or tensors; {fix}")


def split_texts(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into the arrays for the step and the strings that stay on the host, both by name.

    Raises UserError for strings beside numbers in a tuple, because removing them would shift the other elements.
    """
    arrays: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Texts):
            texts[name] = value
        elif isinstance(value, Mapping):
            inner, inner_texts = split_texts(value)
            arrays |= {name: inner} if inner or not value else {}
            texts |= {name: inner_texts} if inner_texts else {}
        elif isinstance(value, tuple) and _holds_texts(value):
            if not all(isinstance(part, Texts) for part in value):
                raise UserError(
                    f"the dataset returns strings beside numbers in the tuple `{name}`; return a dict there, so that "
                    "the strings can stay on the host"
                )
            texts[name] = value
        else:
            arrays[name] = value
    return arrays, texts


def picked(batch: Mapping[str, Any], rows: np.ndarray) -> Any:
    """Return the given rows of a batch, strings included."""
    if isinstance(batch, Mapping):
        return {name: picked(value, rows) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(picked(value, rows) for value in batch)
    return Texts(batch[i] for i in rows) if isinstance(batch, Texts) else batch[rows]


def joined(batches: Sequence[Any]) -> Any:
    """Concatenate the rows of several batches, strings included. Their row shapes must agree."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Mapping):
        return {name: joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, Texts):
        return Texts(text for batch in batches for text in batch)
    if isinstance(first, tuple):
        return tuple(joined(parts) for parts in zip(*batches, strict=True))
    return np.concatenate(batches)


def row_shapes(batch: Any, name: str = "") -> dict[str, tuple[Any, ...]]:
    """Return the number of rows (None for a single number), the shape of a row and the dtype of every array of a
    batch."""
    if isinstance(batch, (Mapping, tuple)) and not isinstance(batch, Texts):
        parts = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        inner = [row_shapes(value, f"{name}.{key}" if name else str(key)) for key, value in parts]
        return {key: value for found in inner for key, value in found.items()}
    if isinstance(batch, Texts):
        return {name: (len(batch), (), "text")}
    return {name: (len(batch), batch.shape[1:], str(batch.dtype)) if batch.ndim else (None, (), str(batch.dtype))}


def samples_in(batch: Mapping[str, Any]) -> int:
    """Return the number of samples in a batch. Raises UserError where its entries have different ones, or none."""
    counts = {name: count for name, (count, *_) in row_shapes(batch).items()}
    single = next((name for name, count in counts.items() if count is None), None)
    if single is not None:
        raise UserError(
            f"`{single}` of a ready-made batch is a single number, wanted an array whose first axis is the sample: "
            "give the DataLoader a batch_size, in place of batch_size=None, or let the dataset return whole batches"
        )
    if len(set(counts.values())) > 1:
        told = ", ".join(f"`{name}` {count}" for name, count in counts.items())
        raise UserError(
            f"the entries of a batch have different numbers of rows ({told}): of a stream the first axis tells how "
            "many samples came. Give every sample a row in each entry, use a map-style Dataset, whose collate function "
            "may give any shapes, or write the loop yourself with jaxtrain.compile, which takes batches as they are"
        )
    return next(iter(counts.values()))


def alike(batches: Sequence[Any]) -> bool:
    """Return True if all batches have the same shapes, so that one call can take them."""
    shapes = lambda part: (
        [shapes(inner) for inner in (part.values() if isinstance(part, Mapping) else part)]
        if isinstance(part, (Mapping, tuple))
        else part.shape
    )
    return len(batches) == 1 or all(shapes(batch) == shapes(batches[0]) for batch in batches)


def _holds_texts(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_texts, value.values()))
    return isinstance(value, Texts) or (isinstance(value, tuple) and any(map(_holds_texts, value)))


@functools.cache
def _is_number(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.number) or dtype in (np.bool_, _BFLOAT16)


def _bfloat16() -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


_BFLOAT16 = _bfloat16()
