"""Wrap training data as sources: torch Datasets, sequences, arrays."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxtrain.data.widths import narrow
from jaxtrain.errors import UserError
from torch_bridge.sources import ForeignSource, OrderedSource, SequentialSource

__all__ = ["ArraySource", "BucketedSource", "ForeignSource", "OrderedSource", "SequentialSource", "as_source"]


class ArraySource:
    """Samples held as columns: a dict of arrays [sample, ...]. Small ones live on the device, gathered in the step.

    batched: batches are slices of the columns, without the task's collate function: the columns are the loss's inputs.
    given: the user's own dict that the columns come from, which may change.
    """

    given: dict[str, Any] | None = None

    def __init__(self, columns: Mapping[str, Any], batched: bool = False):
        self.batched = batched
        self.take(columns)

    def take(self, columns: Mapping[str, Any]) -> None:
        """Replace the columns. Raises UserError if they differ in length."""
        self.columns = {name: _column(name, column) for name, column in columns.items()}
        sizes = {name: len(column) for name, column in self.columns.items()}
        if len(set(sizes.values())) > 1:
            raise UserError(f"the columns differ in length: {sizes}; every sample needs each of them")

    def checksums(self) -> dict[str, tuple]:
        """Return a fingerprint of every column of `given`, by name, to detect changes.

        A read-only or object array is identified by its id, without reading its content.
        """
        found: dict[str, tuple] = {}
        for name, column in (self.given or {}).items():
            array = np.asarray(column)
            content = np.ascontiguousarray(array).reshape(-1)
            written = array.flags.writeable and not array.dtype.hasobject
            found[name] = array.shape, zlib.crc32(cast(Any, content.view(np.uint8))) if written else id(column)
        return found

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        return {name: column[index] for name, column in self.columns.items()}

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())


class PickedRows(ArraySource):
    """Some rows of a columnar source, such as a fold of it. picked: int64 positions of the rows. The columns stay
    whole, so that several such sources share them on the device."""

    def __init__(self, source: ArraySource, picked: np.ndarray):
        self.batched, self.columns, self.picked = source.batched, source.columns, picked

    def __len__(self) -> int:
        return len(self.picked)


def _column(name: str, value: Any) -> np.ndarray:
    array = np.asarray(None if _is_dataset(value) else value)
    if array.ndim:
        return narrow(array)
    raise UserError(
        f"the data's `{name}` is {type(value).__name__}, wanted an array with a row for every sample: a dict is taken "
        "for one dataset of named arrays. Give one Dataset or DataLoader; for several, join them (ConcatDataset), or "
        "make a Trainer for each"
    )


def _is_dataset(value: Any) -> bool:
    """Return True if a dict's entry is itself a dataset; numpy would read all of its samples to convert it."""
    return hasattr(type(value), "__getitems__") or _is_torchs(value) and not hasattr(value, "__array__")


def _is_torchs(value: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "torch" for base in type(value).__mro__)


class BucketedSource:
    """Base class for a task's own source whose samples differ in size and are padded to one of a few batch shapes.

    batch_shapes: the number of different shapes, each compiled once. The shape is a function of all positions of a
    global batch, so that every process pads its rows alike; the batches of one call of several steps share it.
    """

    batch_shapes: int = 1

    def collate_for(self, indices: np.ndarray) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """Return the collate function for a batch. indices: the positions of the batch on all processes."""
        raise TypeError(f"{type(self).__name__} must define collate_for")


def describe_size(source: Any) -> str:
    """Return the number of samples of a source as text, for messages."""
    if isinstance(source, SequentialSource):
        return "an unknown number of" if source.size is None else f"{source.size:,}"
    return f"{len(source):,}"


def batch_shapes(source: Any) -> int:
    """Return the number of different shapes that the batches of a source have."""
    return source.batch_shapes if isinstance(source, BucketedSource) else 1


def _is_columns(dataset: Any) -> bool:
    """Return True for the likely slip (x, y) in place of a Dataset: arrays of as many rows, of different widths."""
    if not isinstance(dataset, tuple | list) or not 1 < len(dataset) < 10:
        return False
    shapes: list[tuple] = [tuple(getattr(value, "shape", ())) for value in dataset]
    return all(shapes) and len({shape[0] for shape in shapes}) == 1 < len(set(shapes))


def as_source(dataset: Any, name: str = "dataset"):
    """Return a source for a torch Dataset or DataLoader, a mapping of arrays, or any sequence of items.

    Raises UserError for anything else.
    """
    if _is_torchs(dataset):
        from torch_bridge.datasets import source_of

        return source_of(dataset)
    if isinstance(dataset, ForeignSource):
        return dataset
    if isinstance(dataset, Mapping):
        source = ArraySource(dataset)
        source.given = dataset if isinstance(dataset, dict) else None
        return source
    if _is_columns(dataset):
        raise UserError(
            f"{name} is a {type(dataset).__name__} of {len(dataset)} arrays of {len(dataset[0])} rows, wanted a "
            "Dataset with a sample for each row: torch.utils.data.TensorDataset(x, y), or a dict of arrays by name"
        )
    if hasattr(dataset, "iloc"):  # a table of pandas: [i] is a column
        raise UserError(
            f"{name} is a {type(dataset).__name__}, whose [i] is a column, wanted a Dataset: "
            "{name: table[name].to_numpy() for name in table} is one, by the names of its columns"
        )
    if isinstance(dataset, (str, bytes)) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"{name} is {type(dataset).__name__}, wanted a torch Dataset, a mapping of arrays, or anything with "
            "__len__ and __getitem__"
        )
    return dataset
