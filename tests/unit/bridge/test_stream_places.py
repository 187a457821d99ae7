"""Streams that tell their place: a resumed run goes on there, where that is seen to give the same samples."""

import numpy as np
import pytest
import torch
from torch.utils import data

from tests.unit.bridge.test_streams import loader, values
from tests.unit.engine import runs

ITEMS, READ = 40, []


def buffered(items):
    """Give the items in the random order of a buffer of eight."""
    buffer, chance = [], np.random.default_rng(0)
    for item in items:
        buffer.append(item)
        if len(buffer) == 8:
            yield buffer.pop(int(chance.integers(8)))
    yield from buffer


class Placed(data.IterableDataset):
    """Forty numbers that tell their place; READ hears of each that is read."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < ITEMS:
            READ.append(self.next)
            self.next += 1
            yield torch.tensor(float(self.next - 1) + self.noise())
        self.next = 0

    def noise(self):
        return 0.0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Shuffled(Placed):
    """Through a buffer that its state does not hold, as in Hugging Face's streams."""

    def __iter__(self):
        return buffered(super().__iter__())


class Noisy(Placed):
    """With the process's random numbers, of which its state holds nothing."""

    def noise(self):
        return np.random.randn()


class Kept(Placed):
    """Its state holds what JSON does not."""

    def state_dict(self):
        return {"next": torch.tensor(self.next)}


class OwnOrder(torch.utils.data.IterableDataset):
    """Shuffles with a generator of its own."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def __len__(self):
        return ITEMS

    def __iter__(self):
        return iter(torch.from_numpy(self.random.permutation(ITEMS)))


def _resumed(dataset, at: int, until: int, count: int = 0):
    """The batches from `at` on in a resumed run, and what was read for them."""
    first, then = loader(dataset(), count), loader(dataset(), count)
    try:
        values(first, range(at))
        then.places.restore(first.places.state(at))
        READ.clear()
        return values(then, range(at, until)), list(READ)
    finally:
        first.close()
        then.close()


@pytest.mark.parametrize("at", [3, 7, 13])  # in the first epoch of ten batches, and in the second
def test_a_stream_that_tells_its_place_goes_on_there(at):
    whole = values(loader(Placed()), range(24))
    found, read = _resumed(Placed, at, 24)
    assert found == whole[at:]
    assert read[0] == at % 10 * 4
    assert sum(map(len, found)) <= len(read) <= sum(map(len, found)) + 4 * 4  # some are read ahead, and one batch tried


@pytest.mark.parametrize("at", [3, 10, 13])
def test_a_stream_with_a_generator_of_its_own_is_read_again_from_the_first_epoch(at):
    assert _resumed(OwnOrder, at, 24)[0] == values(loader(OwnOrder()), range(24))[at:]


def test_a_place_is_found_in_a_worker_process_too():
    assert _resumed(Placed, 5, 12, count=1)[0] == values(loader(Placed()), range(12))[5:]


@pytest.mark.parametrize("dataset", [Shuffled, Noisy, Kept])
def test_a_stream_whose_place_does_not_lead_back_is_read_again(dataset):
    whole = values(loader(dataset()), range(9))
    found, read = _resumed(dataset, 5, 9)
    assert found == whole[5:]
    assert read[0] == 0


def test_a_place_of_another_batch_size_is_not_taken():
    first, then = loader(Placed()), loader(Placed(), size=8)
    values(first, range(4))
    then.places.restore(first.places.state(4))
    assert values(then, range(4, 5)) == [[float(i) for i in range(32, 40)]]


class Pairs(Placed):
    """What tests.unit.engine.runs trains on."""

    def __iter__(self):
        for number in super().__iter__():
            x = torch.sin(number + torch.arange(4.0))
            yield {"x": x, "y": x.sum()}


def test_a_resumed_run_reads_what_is_left_and_has_the_same_bits(tmp_path):
    whole = runs.trained(tmp_path / "whole", samples=Pairs(), train__steps=9)
    runs.trained(tmp_path / "cut", samples=Pairs(), train__steps=3)
    READ.clear()
    resumed = runs.trained(tmp_path / "cut", samples=Pairs(), train__steps=9)
    runs.assert_same_bits(runs.arrays(whole), runs.arrays(resumed))
    assert 24 in READ[:9]  # after the first sample, whose shape is asked for
    assert not {8, 16} & set(READ[: READ.index(24)])


def test_a_stream_of_hugging_faces_goes_on_at_its_place(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "numbers.jsonl").write_text("".join(f'{{"number": {i}.0}}\n' for i in range(ITEMS)))

    def stream():
        return datasets.load_dataset("json", data_files=str(tmp_path / "numbers.jsonl"), split="train", streaming=True)

    first, then = loader(stream()), loader(stream())
    batches = lambda given, calls: [b["number"].tolist() for _, _, b in given.batches((step, 1) for step in calls)]
    whole = batches(loader(stream()), range(15))
    batches(first, range(6))
    then.places.restore(first.places.state(6))
    assert first.places.state(6) is not None
    assert batches(then, range(6, 15)) == whole[6:]
