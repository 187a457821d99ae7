"""Items that are collated one by one, beside items that are collated together."""

import collections

import numpy as np
import pytest

from jaxtrain.data.collate import Columns, collate
from jaxtrain.errors import UserError

Pair = collections.namedtuple("Pair", "first second")
ROWS = [np.arange(6.0, dtype=np.float32).reshape(2, 3) + i for i in range(4)]
ITEMS = {
    "mappings": [{"x": row, 1: i} for i, row in enumerate(ROWS)],
    "tuples": [(row, i) for i, row in enumerate(ROWS)],
    "named tuples": [Pair(row, i / 3) for i, row in enumerate(ROWS)],
    "arrays": ROWS,
    "numbers": [1, 2, 3, 4],
    "nested": [{"x": {"y": row, "z": (row, i)}} for i, row in enumerate(ROWS)],
    "views": [row.T[::-1] for row in ROWS],
    "wide": [(row.astype(np.float64), row.astype(np.int64)) for row in ROWS],
    "foreign bytes": [row.astype(">f4") for row in ROWS],
    "mixed types": [row.astype(dtype) for row, dtype in zip(ROWS, ["i1", "i1", "f4", "i4"], strict=True)],
    "mixed kinds": [ROWS[0], ROWS[1].tolist(), ROWS[2], np.ma.array(ROWS[3])],
}


def one_by_one(items):
    columns = Columns(len(items))
    for item in items:
        columns.append(item)
    return columns.batch()


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
def test_items_one_by_one_make_the_batch_that_they_make_together(items):
    mine, wanted = one_by_one(items), collate(items)
    described = lambda batch: [(leaf.dtype, leaf.tolist()) for leaf in _leaves(batch)]
    assert list(mine) == list(wanted)
    assert described(mine) == described(wanted)


@pytest.mark.parametrize(
    "items",
    [
        [{"x": np.ones(3)}, {"x": np.ones(4)}],
        [{"x": np.ones(3), "y": 1}, {"x": np.ones(3)}],
        [(np.ones(3), 1), (np.ones(3),)],
        [{"x": np.ones(3)}, 5],
        [{"x": {"y": 1, "z": 2}}, {"x": {"y": 1}}],
        [np.ones(2), np.array(["a", "b"])],
        [{"x": np.full(2, 2**40)}] * 2,
    ],
    ids=["shapes", "keys", "lengths", "kinds", "nested keys", "no number", "too large"],
)
def test_items_that_do_not_fit_are_refused_in_the_same_words(items):
    with pytest.raises(UserError) as together:
        collate(items)
    with pytest.raises(UserError) as alone:
        one_by_one(items)
    assert str(alone.value) == str(together.value)


def test_an_array_that_the_dataset_writes_anew_is_a_row_of_its_own():
    buffer, columns = np.zeros(2), Columns(3)
    for i in range(3):
        buffer[:] = i
        columns.append(buffer)
    assert columns.batch()["0"][:, 0].tolist() == [0, 1, 2]


def _leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for inner in value for leaf in _leaves(inner)] if isinstance(value, (list, tuple)) else [value]
