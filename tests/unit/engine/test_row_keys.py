"""Entries of a dataset that bear the names of the loader's own, `valid` and `index`."""

import numpy as np
import pytest

from jaxtrain.data import row_keys
from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader, gather
from jaxtrain.data.sources import ArraySource

COLUMNS = {"x": np.arange(6.0), "valid": np.arange(6) % 2 == 0, "index": np.arange(100, 106)}
ITEMS = [{name: column[i] for name, column in COLUMNS.items()} for i in range(6)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("source", [ITEMS, ArraySource(COLUMNS)], ids=["items", "arrays"])
def test_the_datasets_own_entries_keep_their_names_and_padding_is_still_known(source, on_device):
    if on_device and isinstance(source, list):
        pytest.skip("items do not live on the device")
    loader = Loader(source, IndexStream(6, 4, shuffle=False), None, np.arange(4), on_device=on_device)
    batch = loader.host_batch(1)
    batch = gather(batch, source.columns) if on_device else batch
    assert batch["valid"].tolist() == [True, False, True, True]
    assert batch["index"].tolist() == [104, 105, 104, 104]
    assert row_keys.valid(batch).tolist() == [True, True, False, False]
    assert row_keys.index(batch).tolist() == [4, 5, 4, 4]
    assert list(row_keys.without(batch)) == list(COLUMNS)


def test_one_entry_may_be_taken_and_the_other_not():
    batch = Loader(ArraySource({"valid": np.arange(4)}), IndexStream(4, 4, shuffle=False), None, np.arange(4))
    batch = batch.host_batch(0)
    assert batch["valid"].tolist() == row_keys.index(batch).tolist() == batch["index"].tolist() == [0, 1, 2, 3]
    assert row_keys.valid(batch).all()
    assert list(row_keys.without(batch)) == ["valid"]
