"""The two entries that the loader adds to every batch: `valid` and `index` (task.py).

Where the dataset has an entry of that name itself, its own keeps the name, and the loader's is called `jaxtrain.valid`
or `jaxtrain.index`. Whoever means the loader's entries asks here.
"""

from collections.abc import Container, Mapping
from typing import Any

VALID, INDEX = "valid", "index"
PREFIX = "jaxtrain."


def rows(index: Any, valid: Any, taken: Container[str]) -> dict[str, Any]:
    """Return the loader's two entries under names that are not `taken` by the dataset."""
    return {PREFIX + name if name in taken else name: value for name, value in ((INDEX, index), (VALID, valid))}


def join(added: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of the loader's entries and the dataset's."""
    return {**rows(index(added), valid(added), data), **data}


def valid(batch: Mapping[str, Any]) -> Any:
    """Return which rows are samples and not padding, bool [batch]."""
    return batch[PREFIX + VALID] if PREFIX + VALID in batch else batch[VALID]


def index(batch: Mapping[str, Any]) -> Any:
    """Return the samples' positions in the dataset, int32 [batch]."""
    return batch[PREFIX + INDEX] if PREFIX + INDEX in batch else batch[INDEX]


def without(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dataset's own entries."""
    added = {PREFIX + name if PREFIX + name in batch else name for name in (VALID, INDEX)}
    return {name: value for name, value in batch.items() if name not in added}


def reserved(batch: Mapping[str, Any]) -> list[str]:
    """List the names of the loader's that the dataset uses itself."""
    return [name for name in (VALID, INDEX) if PREFIX + name in batch]


def gather(batch: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a batch of every column, beside what the batch already holds. Traced."""
    return {name: column[index(batch)] for name, column in columns.items()} | batch
