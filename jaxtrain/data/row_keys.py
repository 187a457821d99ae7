"""Access the two entries that the loader adds to every batch: `valid` and `index` (task.py).

If the dataset has an entry of that name itself, the dataset's entry keeps it and the loader's is called
`jaxtrain.valid` or `jaxtrain.index`. Code that needs the loader's entries uses the functions of this module.
"""

from collections.abc import Container, Mapping
from typing import Any

VALID, INDEX = "valid", "index"
PREFIX = "jaxtrain."


def rows(index: Any, valid: Any, taken: Container[str]) -> dict[str, Any]:
    """Return the loader's two entries under names that are not `taken` by the dataset."""
    return {PREFIX + name if name in taken else name: value for name, value in ((INDEX, index), (VALID, valid))}


def join(added: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch that has both the loader's entries and the dataset's."""
    return {**rows(index(added), valid(added), data), **data}


def valid(batch: Mapping[str, Any]) -> Any:
    """Return a mask, bool [batch], that is True for samples and False for padding rows."""
    return batch[PREFIX + VALID] if PREFIX + VALID in batch else batch[VALID]


def index(batch: Mapping[str, Any]) -> Any:
    """Return the samples' positions in the dataset, int32 [batch]."""
    return batch[PREFIX + INDEX] if PREFIX + INDEX in batch else batch[INDEX]


def without(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch without the loader's entries."""
    added = {PREFIX + name if PREFIX + name in batch else name for name in (VALID, INDEX)}
    return {name: value for name, value in batch.items() if name not in added}


def reserved(batch: Mapping[str, Any]) -> list[str]:
    """List the names `valid` and `index` as far as the dataset uses them for entries of its own."""
    return [name for name in (VALID, INDEX) if PREFIX + name in batch]


def gather(batch: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Add to a batch its rows of every column, gathered by index; existing entries stay. Traced."""
    return {name: column[index(batch)] for name, column in columns.items()} | batch
