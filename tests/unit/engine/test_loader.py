"""What the loader asks for and keeps."""

import itertools
import weakref

import numpy as np
import pytest

from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader
from jaxtrain.data.sources import ArraySource

ONE_BY_ONE = [{"x": np.float32(i)} for i in range(40)]


@pytest.mark.parametrize(
    ("source", "on_device"),
    [(ArraySource({"x": np.arange(40)}), False), (ArraySource({"x": np.arange(40)}), True), (ONE_BY_ONE, False)],
    ids=["arrays", "device", "samples"],
)
def test_batches_that_were_used_are_let_go(source, on_device):
    used = []
    place = lambda batches: used.extend(weakref.ref(batch["index"]) for batch in batches)
    loader = Loader(source, IndexStream(40, 4), place, np.arange(4), on_device=on_device)
    alive = [sum(index() is not None for index in used) for _ in loader.batches((step, 1) for step in range(200))]
    assert max(alive) < 10


def test_calls_are_asked_for_as_they_are_needed():
    loader = Loader(ONE_BY_ONE, IndexStream(40, 4), lambda batches: None, np.arange(4))
    batches = loader.batches((step, 1) for step in itertools.count())
    assert [first for first, _, _ in itertools.islice(batches, 3)] == [0, 1, 2]
    batches.close()


class WithRaw:
    """A dataset of the user's that has an attribute by the name of one of ours."""

    raw = np.arange(40.0)

    def __len__(self):
        return len(self.raw)

    def __getitem__(self, index):
        return {"x": -self.raw[index]}


def test_a_dataset_may_have_an_attribute_called_raw():
    loader = Loader(WithRaw(), IndexStream(40, 4, shuffle=False), lambda batches: batches[0], np.arange(4))
    assert loader.host_batch(0)["x"].tolist() == [0, -1, -2, -3]
