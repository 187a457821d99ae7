"""Items of every kind: default_collate's numbers, strings on the host, or one sentence that names the entry."""

import collections
import pathlib

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils import data

from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader, own_batch_size
from jaxtrain.data.sources import as_source
from jaxtrain.errors import UserError

Pair = collections.namedtuple("Pair", "first second")


class Items(data.Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.make(index)


def loader(make, **options) -> Loader:
    source = as_source(Items(make))
    return Loader(source, IndexStream(3, 3, shuffle=False), lambda batches: batches[0], np.arange(3), **options)


NUMBERS = {
    "a list of numbers": lambda i: {"y": [i, i + 1, i + 2]},
    "a tuple of floats": lambda i: (i / 3, [i * 1.0, 2.0]),
    "numpy scalars": lambda i: (np.float64(i), np.int64(i)),
    "a named tuple": lambda i: Pair(i, torch.ones(2) * i),
    "nested": lambda i: {"a": [torch.ones(1) * i, {"b": i}]},
    "a tensor with a gradient": lambda i: torch.ones(2, requires_grad=True) * i,
}


@pytest.mark.parametrize("make", NUMBERS.values(), ids=NUMBERS)
def test_items_become_default_collates_numbers(make):
    wanted = flat(data.default_collate([make(i) for i in range(3)]))
    batch = {k: v for k, v in loader(make).host_batch(0).items() if k not in ("valid", "index")}
    got = flat(batch)
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-6)


def flat(value) -> list:
    inner = value.values() if isinstance(value, dict) else value
    return [x for part in inner for x in flat(part)] if isinstance(value, (dict, list, tuple)) else [value]


REFUSED = {
    "None": (lambda i: {"x": 1, "y": None}, "NoneType for `y`.*stands for"),
    "PIL": (lambda i: {"x": Image.new("RGB", (2, 2))}, "Image for `x`.*array or tensor"),
    "sparse": (lambda i: {"x": torch.eye(2).to_sparse()}, "`x`: a sparse tensor.*to_dense"),
    "meta": (lambda i: {"x": torch.ones(2, device="meta")}, "`x`: a tensor on the meta device"),
    "a set": (lambda i: {"x": {1, 2}}, "set for `x`"),
    "longer tuples": (lambda i: (1.0,) * (i + 1), "an item is a tuple of 1 in one sample and a tuple of 2"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_values_that_are_no_numbers_are_refused_by_name(make, words):
    with pytest.raises(UserError, match=words):
        loader(make).host_batch(0)


@pytest.mark.parametrize("collate", [None, data.default_collate], ids=["ours", "torch's as the user's own"])
def test_strings_and_paths_stay_on_the_host(collate):
    make = lambda i: {"x": torch.ones(1) * i, "path": f"{i}.png", "meta": {"id": f"id{i}", "size": i}}
    source = as_source(data.DataLoader(Items(make), 3, collate_fn=None if collate is None else lambda b: collate(b)))
    given = Loader(source, IndexStream(3, 3, shuffle=False), lambda b: b[0], np.arange(3), keep_texts=True)
    ((_, _, batch),) = given.batches([(0, 1)])
    assert sorted(batch) == ["index", "meta", "valid", "x"]
    assert list(batch["meta"]) == ["size"]
    assert given.texts[0] == {"path": ["0.png", "1.png", "2.png"], "meta": {"id": ["id0", "id1", "id2"]}}


def test_paths_are_strings_too_and_a_stream_may_hold_them():
    class Stream(data.IterableDataset):
        def __iter__(self):
            return iter([(torch.tensor(i), pathlib.Path(f"{i}.wav")) for i in range(3)])

    from jaxtrain.data.index_stream import IterableStream

    source = as_source(Stream())
    given = Loader(source, IterableStream(source, 2, once=True), lambda b: b[0], np.arange(2), keep_texts=True)
    assert [batch["0"].tolist() for _, _, batch in given.batches((i, 1) for i in range(9))] == [[0, 1], [2, 2]]
    assert [list(map(str, texts["1"])) for texts in given.texts.values()] == [["0.wav", "1.wav"], ["2.wav", "2.wav"]]


def test_strings_beside_numbers_in_a_nested_tuple_are_refused():
    with pytest.raises(UserError, match="strings beside numbers in the tuple `pair`"):
        loader(lambda i: {"pair": (f"{i}", i)}, keep_texts=True).host_batch(0)


class Numbers(data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4.0))


class Doubling(data.DataLoader):
    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Doubling(range(4), 2), "a DataLoader whose class Doubling has a __iter__ of its own"),
        (lambda: {"train": data.TensorDataset(torch.ones(4))}, "the data's `train` is TensorDataset, wanted an array"),
        (lambda: "data.csv", "dataset is str, wanted a torch Dataset"),
        (lambda: {"a": data.DataLoader(range(4), 2)}, "the data's `a` is DataLoader, wanted an array with a row"),
        (lambda: iter(data.DataLoader(range(4), 2)), "gives its batches once; wanted the DataLoader itself"),
    ],
)
def test_what_holds_no_samples_is_refused(given, words):
    with pytest.raises(UserError, match=words):
        as_source(given())


def test_a_ready_made_batch_that_is_a_single_number_is_refused():
    with pytest.raises(UserError, match="`0` of a ready-made batch is a single number"):
        own_batch_size(as_source(data.DataLoader(Numbers(), batch_size=None)))
