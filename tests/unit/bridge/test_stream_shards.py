"""Streams in shards: one order for any number of processes and workers, each of which reads its own, resumed there."""

import collections
import copy
import json

import numpy as np
import pytest
import torch
from torch.utils import data

from jaxtrain.data import stream_places
from jaxtrain.data.index_stream import IterableStream
from jaxtrain.data.loader import make_reader
from jaxtrain.data.sharded_loader import ShardedLoader, in_shards
from jaxtrain.data.sources import as_source
from jaxtrain.data.stream_shards import Sharding
from jaxtrain.data.workers import InlinePool, ProcessPool
from jaxtrain.errors import UserError
from tests.unit.bridge.test_stream_places import buffered
from tests.unit.engine import runs

LENGTHS = (40, 25, 33, 40, 40, 40, 17, 40)  # of eight files
READ: list[float] = []


class Files(data.IterableDataset):
    """Numbers in files of different lengths: 100 * file + place. READ hears of each that is read."""

    def __init__(self, files=tuple(range(8))):
        self.files, self.file, self.next = list(files), 0, 0

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index):
        return type(self)(self.files[index::num_shards])

    def __iter__(self):
        for place in range(self.file, len(self.files)):
            self.file, number = place, self.files[place]
            while self.next < LENGTHS[number]:
                READ.append(100 * number + self.next)
                self.next += 1
                yield torch.tensor(float(100 * number + self.next - 1) + self.noise())
            self.next = 0
        self.file = 0

    def noise(self):
        return 0.0


class Placed(Files):
    """It tells its place."""

    def state_dict(self):
        return {"file": self.file, "next": self.next}

    def load_state_dict(self, state):
        self.file, self.next = state["file"], state["next"]


class Noisy(Placed):
    """With the process's random numbers, of which its state holds nothing."""

    def noise(self):
        return np.random.rand()


class OwnBuffer(Placed):
    """Through a buffer that its state does not hold."""

    def __iter__(self):
        return buffered(super().__iter__())


def masked(items):
    """A collate function that draws, as that of masked language modelling."""
    return {"0": torch.stack(items), "1": torch.rand(len(items))}


class InThread:
    """Workers that read in this process, each with a reader of its own."""

    ahead = 2

    def __init__(self, reader, workers):
        self.workers = workers
        self.pools = [InlinePool(copy.deepcopy(reader)) for _ in range(workers)]
        self.reader = self.pools[0].reader

    def start(self):
        for pool in self.pools:
            pool.start()

    def send(self, worker, message):
        self.pools[worker].send(0, message)

    def receive(self, worker):
        return self.pools[worker].receive(0)

    def close(self):
        pass


def loader(dataset, rows=None, workers=0, shards=4, size=8, buffer=None, accumulate=1, step=0):
    source = as_source(dataset)
    sharding = Sharding(shards, size, buffer, accumulate)
    stream = IterableStream(source, size, sharding=sharding)
    reader = in_shards(make_reader(source, None, size, 3))
    pool = InThread(reader, workers) if workers else InlinePool(reader)
    rows = np.arange(size) if rows is None else rows
    return ShardedLoader(source, stream, lambda batches: batches[0], rows, pool=pool, seed=3)


def values(given, calls, name="0") -> list[list[float]]:
    return [batch[name].tolist() for _, _, batch in given.batches((step, 1) for step in calls)]


def read(dataset, processes, workers, calls, **options):
    """The rows of every batch that so many processes read, one after another."""
    size = options.get("size", 8)
    parts = []
    for rows in np.array_split(np.arange(size), processes):
        given = loader(dataset(), rows, workers, **options)
        try:
            parts.append(values(given, calls))
        finally:
            given.close()
    return [sum(shares, []) for shares in zip(*parts, strict=True)]


@pytest.mark.parametrize("buffer", [None, 5])
@pytest.mark.parametrize("dataset", [Files, Noisy, lambda: data.DataLoader(Files(), 8, collate_fn=masked)])
@pytest.mark.parametrize("shards", [4, 8])
def test_the_batches_are_the_same_for_any_number_of_processes_and_workers(dataset, shards, buffer):
    steps = range(24)  # the shortest shard begins again
    wanted = read(dataset, 1, 0, steps, shards=shards, buffer=buffer)
    for processes, workers in ((1, 2), (2, 0), (2, 2)):
        assert read(dataset, processes, workers, steps, shards=shards, buffer=buffer) == wanted


def test_worker_processes_read_what_one_reads_alone():
    wanted = read(Noisy, 1, 0, range(12), buffer=5)
    given = loader(Noisy(), buffer=5)
    given.pool = ProcessPool(given.reader, 2, 60)
    try:
        assert values(given, range(12)) == wanted
    finally:
        given.close()


def test_more_shards_than_rows_take_turns():
    wanted = read(Files, 1, 0, range(12), shards=8, size=2)
    assert wanted[:5] == [[0, 400], [100, 500], [200, 600], [300, 700], [1, 401]]
    assert read(Files, 2, 2, range(12), shards=8, size=2) == wanted


@pytest.mark.parametrize(("process", "seen"), [(0, {0, 1, 4, 5}), (1, {2, 3, 6, 7})])
def test_a_process_opens_and_reads_its_own_shards_alone(process, seen):
    READ.clear()
    values(loader(Files(), np.array_split(np.arange(8), 2)[process]), range(25))
    assert {int(number) // 100 for number in READ} == seen
    assert 4 * 25 <= len(READ) <= 4 * 25 + 4 * 4  # half of what the batches hold, and what is read ahead


def test_every_shard_gives_all_its_samples_in_each_of_its_passes_and_begins_again_as_it_ends():
    found = sum(values(loader(Files()), range(40)), [])  # 80 samples of each shard, of 80, 65, 50 and 80
    counts = collections.Counter(found)
    assert len(counts) == sum(LENGTHS)
    assert {counts[100 * file] for file in (0, 4, 3, 7)} == {1}
    assert [counts[600 + i] for i in (0, 16)] == [1, 1]
    assert [counts[200 + i] for i in (0, 29, 30, 32)] == [2, 2, 1, 1]


def test_the_micro_batches_of_a_step_share_its_samples_and_each_process_keeps_its_shards():
    alone = read(Files, 1, 0, range(9))
    rows = [np.concatenate([4 * i + np.arange(2) + 2 * process for i in range(2)]) for process in range(2)]
    READ.clear()
    halves = [values(loader(Files(), own, accumulate=2), range(9)) for own in rows]
    assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == list(map(sorted, alone))
    assert {int(number) // 100 for number in sum(halves[0], [])} == {0, 1}


def test_a_shuffle_buffer_gives_every_sample_once_in_a_pass_and_another_order_in_the_next():
    found = [batch[0] for batch in values(loader(Files(), shards=1, size=1, buffer=16), range(2 * sum(LENGTHS)))]
    first, second = found[: sum(LENGTHS)], found[sum(LENGTHS) :]
    assert sorted(first) == sorted(second) == [100 * file + i for file, n in enumerate(LENGTHS) for i in range(n)]
    assert first != second
    assert first[:16] != sorted(first[:16]) == [float(i) for i in range(16)]


# --- resumed ---------------------------------------------------------------------------------------------------------


def resumed(dataset, at, until, before=(1, 0), after=(1, 0), **options):
    """The batches from `at` on, of a run that goes on with another number of processes and workers."""
    shares, first = [], None
    for rows in np.array_split(np.arange(8), before[0]):
        given = loader(dataset(), rows, before[1], **options)
        values(given, range(at))
        first = first or given.places.state(at)
        shares.append(stream_places.share(given.places.state(at)))
        given.close()
    state = json.loads(json.dumps(stream_places.merged(first, shares)))
    READ.clear()
    parts = []
    for rows in np.array_split(np.arange(8), after[0]):
        given = loader(dataset(), rows, after[1], **options)
        given.places.restore(state)
        parts.append(values(given, range(at, until)))
        given.close()
    return [sum(rows, []) for rows in zip(*parts, strict=True)]


@pytest.mark.parametrize("buffer", [None, 5])
@pytest.mark.parametrize("at", [3, 27, 38])  # in the first pass of all shards, and in later ones of some
@pytest.mark.parametrize("dataset", [Files, Placed, Noisy, OwnBuffer])
def test_a_resumed_stream_goes_on_with_the_same_batches(dataset, at, buffer):
    whole = read(dataset, 1, 0, range(60), buffer=buffer)
    assert resumed(dataset, at, 60, buffer=buffer) == whole[at:]


@pytest.mark.parametrize(("before", "after"), [((2, 0), (1, 0)), ((1, 2), (2, 0)), ((2, 2), (1, 2)), ((1, 0), (2, 1))])
def test_a_stream_goes_on_with_another_number_of_processes_and_workers(before, after):
    whole = read(Placed, 1, 0, range(40), buffer=5)
    assert resumed(Placed, 22, 40, before, after, buffer=5) == whole[22:]


@pytest.mark.parametrize(
    ("dataset", "buffer", "most"), [(Placed, None, 0), (Placed, 5, 4 * (5 + 5)), (Files, None, 4 * 40)]
)
def test_a_resume_reads_again_a_buffer_at_most_and_without_places_the_present_pass(dataset, buffer, most):
    resumed(dataset, 20, 24, buffer=buffer)
    needed = 8 * 4
    assert needed <= len(READ) <= needed + most + 3 * 8  # and the batches that are read ahead


def test_the_steps_before_are_dropped_where_no_place_is_known():
    whole = read(Files, 1, 0, range(30))
    assert values(loader(Files()), range(21, 30)) == whole[21:]
    assert loader(Files()).host_batch(21)["0"].tolist() == whole[21]


class Pairs(Placed):
    """What tests.unit.engine.runs trains on."""

    def __iter__(self):
        for number in super().__iter__():
            x = torch.sin(number + torch.arange(4.0))
            yield {"x": x, "y": x.sum()}


def test_a_run_on_shards_resumes_with_the_same_bits(tmp_path):
    given = {"data__stream_shards": 4, "data__shuffle_buffer": 6, "train__accumulate_steps": 2}
    whole = runs.trained(tmp_path / "whole", samples=Pairs(), train__steps=30, **given)
    runs.trained(tmp_path / "cut", samples=Pairs(), train__steps=13, **given)
    resumed = runs.trained(tmp_path / "cut", samples=Pairs(), train__steps=30, data__num_workers=2, **given)
    runs.assert_same_bits(runs.arrays(whole), runs.arrays(resumed))


# --- refused ---------------------------------------------------------------------------------------------------------


class Whole(data.IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.zeros(4), "y": torch.tensor(0.0)}] * 16)


class Ragged(Files):
    def __iter__(self):
        return (torch.zeros(1 + int(number) // 100) for number in super().__iter__())


def test_a_stream_without_shards_says_what_to_add(tmp_path):
    with pytest.raises(UserError, match=r"Whole has no method `shard`, wanted shard\(num_shards, index\)"):
        runs.trained(tmp_path, samples=Whole(), data__stream_shards=2)


def test_a_stream_without_shards_may_be_one(tmp_path):
    assert runs.trained(tmp_path, samples=Whole(), data__stream_shards=1, data__shuffle_buffer=4, train__steps=3)


def test_more_shards_than_files_are_refused_with_their_number(tmp_path):
    with pytest.raises(UserError, match="16, but the dataset consists of 8"):
        runs.trained(tmp_path, samples=Pairs(), data__stream_shards=16)


def test_a_number_that_does_not_fit_the_batch_is_refused_with_those_that_do():
    with pytest.raises(UserError, match="6 neither divides data.batch_size 8 nor is a .*; nearest are 4 and 8"):
        Sharding(6, 8)


def test_shards_need_the_number_of_steps(tmp_path):
    with pytest.raises(UserError, match="train.steps: wanted beside data.stream_shards"):
        runs.trained(tmp_path, samples=Pairs(), data__stream_shards=4, train__steps=None, train__epochs=1)


def test_data_that_are_found_by_position_have_no_shards(tmp_path):
    with pytest.raises(UserError, match="the training data are no stream"):
        runs.trained(tmp_path, data__stream_shards=4)


def test_rows_of_different_shapes_are_refused():
    with pytest.raises(UserError, match="rows of `0` have shape .* pad every sample to the same length"):
        values(loader(Ragged(), shards=8), range(3))


@pytest.mark.parametrize(
    ("settings", "words"), [({}, "set stream_shards too"), ({"stream_shards": 2, "shuffle": False}, "shuffle: false")]
)
def test_a_shuffle_buffer_that_would_do_nothing_is_refused(settings, words):
    from jaxtrain.config import DataConfig

    with pytest.raises(ValueError, match=words):
        DataConfig(shuffle_buffer=8, **settings)


def test_a_shard_that_gives_nothing_is_named():
    class Empty(Files):
        def __iter__(self):
            return iter([]) if 3 in self.files else super().__iter__()

    with pytest.raises(UserError, match="shard 3 of 8 .* has no sample in its pass 0"):
        values(loader(Empty(), shards=8), range(3))
