"""Examples that are read before a run whose samples workers read leave the dataset as torch would leave it."""

import sys
import types

import numpy as np
import pytest
import torch
from torch.utils import data

from jaxtrain.data.example import first_samples
from jaxtrain.data.loader import Loader, make_pool, make_reader, make_stream
from jaxtrain.data.peek import read_by
from jaxtrain.data.sample_reader import raw_items
from jaxtrain.data.sources import as_source
from jaxtrain.data.workers import freeze
from jaxtrain.errors import DataError, UserError
from tests.unit.bridge import data_sets as sets


class Counting(data.Dataset):
    """Opens a file on first use, and counts its reads."""

    file, reads = None, 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.file = self.file or open(__file__)  # noqa: SIM115
        self.reads += 1
        return torch.tensor([index, self.reads])


class Shifted(data.IterableDataset):
    """Has no number before a worker_init_fn gives it one."""

    mark = None

    def __iter__(self):
        return iter(torch.arange(8) + self.mark)


class Trouble(data.Sampler):
    def __iter__(self):
        yield from range(6)
        raise KeyError("lost")

    def __len__(self):
        return 8


class Endless(data.Dataset):
    def __len__(self):
        raise KeyError("lost")

    def __getitem__(self, index):
        return torch.tensor(index)


def loader(dataset, workers: int) -> Loader:
    source = as_source(dataset)
    read_by(source, workers)
    stream = make_stream(source, 4, 0, True, False, False)
    pool = make_pool(make_reader(source, None, 4, 0), workers, 60, "forkserver")
    return Loader(source, stream, lambda batches: batches[0], np.arange(4), pool=pool)


def first_batch(given: Loader) -> list:
    batches = [batch["0"].tolist() for _, _, batch in given.batches([(0, 1)])]
    given.close()
    return batches[0]


def test_an_example_for_workers_does_not_touch_the_dataset():
    dataset = Counting()
    assert first_samples(loader(dataset, 2))["0"].tolist() == [[0, 1], [1, 2]]
    assert (dataset.file, dataset.reads) == (None, 0)


def test_workers_read_the_samples_of_the_example_themselves():
    given = loader(Counting(), 1)
    first_samples(given)
    assert first_batch(given) == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_without_workers_the_example_counts_as_the_first_read():
    given = loader(Counting(), 0)
    first_samples(given)
    assert first_batch(given) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert given.source.dataset.reads == 4


def test_an_example_is_read_as_by_a_worker_with_its_worker_init_fn():
    given = loader(data.DataLoader(sets.Marked(), 4, num_workers=2, worker_init_fn=sets.mark_worker), 2)
    assert first_samples(given)["0"].tolist() == [[0, 100, 2], [1, 100, 2]]
    assert torch.utils.data.get_worker_info() is None


def test_raw_items_for_workers_leave_the_dataset_alone():
    given = loader(Counting(), 2)
    assert [item.tolist() for item in raw_items(given.reader, np.array([5, 3]))] == [[5, 1], [3, 2]]
    assert given.source.dataset.reads == 0


def test_a_stream_that_its_worker_init_fn_prepares_gives_an_example():
    given = loader(data.DataLoader(Shifted(), 4, num_workers=1, worker_init_fn=sets.mark_worker), 1)
    assert first_samples(given)["0"].tolist() == [100, 101]


def test_a_class_of_a_notebook_is_refused_for_workers_with_what_to_do(monkeypatch):
    notebook = types.ModuleType("__main__")
    notebook.Cell = type("Cell", (Counting,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(UserError, match="`Cell`, which is defined in a notebook.*num_workers=0.*a .py file"):
        freeze(make_reader(as_source(notebook.Cell()), None, 4, 0))


def test_a_sampler_that_raises_is_named_with_its_place():
    with pytest.raises(
        DataError, match="DataLoader's Trouble raised at batch 1 of epoch 0: KeyError: 'lost'"
    ) as caught:
        loader(data.DataLoader(Counting(), 4, sampler=Trouble()), 0)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("wrapped", [lambda d: d, lambda d: data.DataLoader(d, 4)], ids=["dataset", "loader"])
def test_a_length_that_raises_is_named(wrapped):
    with pytest.raises(DataError, match="the data's Endless raised at __len__: KeyError: 'lost'"):
        loader(wrapped(Endless()), 0)
