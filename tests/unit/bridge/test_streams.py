"""Iterable datasets, and the orders of samplers: every pass as torch makes it, resumed at its place."""

import itertools
import os
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils import data

from jaxtrain.data import workers
from jaxtrain.data.index_stream import SamplerStream
from jaxtrain.data.loader import Loader, make_pool, make_reader, make_stream
from jaxtrain.data.sample_reader import SequenceReader
from jaxtrain.data.sources import as_source
from jaxtrain.errors import UserError


class Stream(data.IterableDataset):
    """Eight numbers. length: what __len__ returns, or the exception that it raises."""

    def __init__(self, length=None):
        self.length = length

    def __iter__(self):
        info = data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter([torch.tensor(float(i)) for i in range(first, 8, step)])

    def __len__(self):
        if isinstance(self.length, int):
            return self.length
        raise self.length or TypeError("no length")


class ByRank(data.IterableDataset):
    def __iter__(self):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return iter([torch.tensor(float(i)) for i in range(rank, 8, world)])


class Noise(data.IterableDataset):
    def __iter__(self):
        for _ in range(8):
            time.sleep(0.001)
            yield torch.tensor(np.random.randn())


class Drawing(data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor(np.random.randn())


def loader(dataset, count=0, size=4, training=True, **length):
    source = as_source(dataset)
    size = getattr(source, "batch_size", None) or size
    stream = make_stream(source, size, 3, training, False, False, **length)
    pool = make_pool(make_reader(source, None, size, 3), count, 60, "forkserver")
    return Loader(source, stream, lambda batches: batches[0], np.arange(stream.batch_size), pool=pool, seed=3)


def values(given, calls) -> list[list[float]]:
    batches = given.batches((step, 1) for step in calls)
    return [batch["0"][batch["valid"]].tolist() for _, _, batch in batches]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: data.DataLoader(s, 4)], ids=["alone", "loader"])
def test_every_evaluation_passes_over_the_whole_stream_anew(wrap, count):
    given = loader(wrap(Stream()), count, training=False)
    try:
        passes = [values(given, itertools.count()) for _ in range(3)]
    finally:
        given.close()
    assert passes == 3 * [[[0, 1, 2, 3], [4, 5, 6, 7]]]


@pytest.mark.parametrize("length", [4, 5, 100])
def test_an_evaluation_reads_to_the_end_whatever_the_promised_length(length):
    assert values(loader(Stream(length), training=False), itertools.count()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("length", "words"), [(4, "gives more than the 1 batches in epoch 0"), (100, "gave 2 batches .* wanted 25")]
)
def test_training_refuses_a_wrong_length_instead_of_losing_samples(length, words):
    with pytest.raises(UserError, match=words):
        values(loader(Stream(length)), range(30))


def test_samples_past_the_promised_length_of_the_last_epoch_are_warned_of():
    with pytest.warns(UserWarning, match="more than the 1 batches.*was not trained on"):
        assert values(loader(Stream(4)), range(1)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_that_share_a_stream_may_each_end_with_a_short_batch(drop_last):
    wanted = 2 * ([[0, 2, 4], [1, 3, 5]] + ([] if drop_last else [[6], [7]]))
    given = loader(data.DataLoader(Stream(8), 3, num_workers=2, drop_last=drop_last), 2)
    try:
        assert values(given, range(len(wanted))) == wanted
        assert given.stream.steps_of(2) == len(wanted)
    finally:
        given.close()


@pytest.mark.parametrize("error", [TypeError, NotImplementedError])
def test_a_length_that_raises_is_unknown(error):
    source = as_source(Stream(error("unknown")))
    assert source.size is None
    assert as_source(data.DataLoader(Stream(error("unknown")), 4)).steps_per_epoch(4) is None


@pytest.mark.parametrize("count", [0, 1])
def test_training_begins_anew_after_another_use_of_its_loader(count):
    given = loader(Stream(), count)
    try:
        first = values(given, range(1))
        assert values(given, range(3)) == [*first, [4, 5, 6, 7], *first]
    finally:
        given.close()


def test_a_worker_process_of_one_of_several_processes_reads_the_whole_stream(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    pool = workers.ProcessPool(SequenceReader(as_source(ByRank()), None, 8, whole=True), 1, 60)
    try:
        assert [batch["0"].tolist() for batch in workers.iterate_epoch(pool, 0)] == [[0, 1, 2, 3, 4, 5, 6, 7]]
    finally:
        pool.close()


# --- global random numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Noise(), Drawing()], ids=["iterable", "map-style"])
def test_readers_in_two_threads_draw_what_each_of_them_draws_alone(dataset):
    alone = values(loader(dataset), range(4))
    found = {}
    read = lambda name: found.__setitem__(name, values(loader(Drawing() if name else dataset), range(4)))
    threads = [threading.Thread(target=read, args=[name]) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == alone
    assert found[1] == found[2]


def test_a_streams_numbers_go_on_whatever_the_caller_draws_and_leave_the_callers_alone():
    alone = values(loader(Noise()), range(2))
    np.random.seed(1)
    wanted = np.random.rand(3).tolist()
    np.random.seed(1)
    given, drawn = loader(Noise()), []
    batches = given.batches((step, 1) for step in range(2))
    found = [(drawn.append(np.random.rand()), batch["0"].tolist())[1] for _, _, batch in batches]
    assert found == alone
    assert [*drawn, np.random.rand()] == wanted


# --- samplers --------------------------------------------------------------------------------------------------------


class Own:
    """A batch sampler that draws from a generator as it is asked for an iterator, and has no batch_size."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).reshape(4, 2).tolist())

    def __len__(self):
        return 4


class Pool:
    """A sampler whose own counter and pool go on from epoch to epoch."""

    def __init__(self):
        self.rng, self.passes = np.random.default_rng(5), 0

    def __iter__(self):
        self.passes += 1
        yield from (self.rng.permutation(8) + 0 * self.passes).tolist()[: 4 + self.passes]


class Endless:
    def __iter__(self):
        return ([i % 8, (i + 1) % 8] for i in itertools.count())


def plain() -> data.TensorDataset:
    return data.TensorDataset(torch.arange(8.0))


def own(workers=0):
    generator = torch.Generator().manual_seed(3)
    context = {"num_workers": workers, "multiprocessing_context": "forkserver"} if workers else {}
    return data.DataLoader(plain(), batch_sampler=Own(generator), generator=generator, **context)


MAKERS = {
    "own batch sampler": own,
    "own batch sampler, torch with workers": lambda: own(1),
    "sampler with a generator": lambda: data.DataLoader(
        plain(), 2, sampler=data.RandomSampler(plain(), generator=torch.Generator().manual_seed(3))
    ),
    "weighted": lambda: data.DataLoader(
        plain(), 3, sampler=data.WeightedRandomSampler(range(1, 9), 11, generator=torch.Generator().manual_seed(2))
    ),
    "a pool that goes on": lambda: data.DataLoader(plain(), 2, sampler=Pool()),
    "ready-made batches": lambda: data.DataLoader(
        plain(), None, sampler=data.RandomSampler(plain(), generator=torch.Generator().manual_seed(3))
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_order_is_torchs_in_every_epoch_and_after_a_resume(make):
    torchs = make()
    wanted = [(b[0] if isinstance(b, (list, tuple)) else b).reshape(-1).tolist() for _ in range(3) for b in torchs]
    ready = torchs.batch_size is None and torchs.batch_sampler is None
    if ready:  # rows of one item each
        given = lambda: loader(
            data.DataLoader([[torch.tensor([float(i)])] for i in range(8)], None, sampler=make().sampler)
        )
    else:
        given = lambda: loader(make(), size=None, epochs=3)
    steps = len(wanted)
    assert values(given(), range(steps)) == wanted
    assert values(given(), range(steps - 4, steps)) == wanted[-4:]


def test_the_users_own_generator_and_sampler_stay_as_they_were():
    given = own()
    before = given.generator.get_state()
    values(loader(given, size=None), range(8))
    assert torch.equal(given.generator.get_state(), before)


def test_a_second_use_of_a_loader_begins_with_its_first_epoch():
    given = loader(own(), size=None, epochs=2)
    first = values(given, range(8))
    assert values(given, range(8)) == first


def test_epochs_may_have_different_numbers_and_sizes_of_batches():
    class Budget:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([[0, 1], [2, 3], [4, 5], [6, 7]] if self.epoch % 2 == 0 else [[0, 1, 2], [3, 4, 5], [6, 7]])

    stream = SamplerStream(as_source(data.DataLoader(plain(), batch_sampler=Budget())), None, epochs=3)
    assert (stream.steps_of(3), stream.batch_size, stream.place(7)) == (11, 3, (2, 0))
    assert [stream.batch(step)[0][stream.batch(step)[1]].tolist() for step in (3, 4, 6, 7)] == [
        [6, 7], [0, 1, 2], [6, 7], [0, 1],
    ]  # fmt: skip


def test_a_sampler_without_end_needs_the_number_of_steps():
    endless = lambda: data.DataLoader(plain(), batch_sampler=Endless())
    with pytest.raises(UserError, match="a sampler that does not end needs train.steps"):
        SamplerStream(as_source(endless()), None, epochs=1)
    assert values(loader(endless(), size=None, steps=200), range(198, 200)) == [[6, 7], [7, 0]]


def test_a_sampler_that_cannot_be_copied_is_refused_at_the_start():
    class Held(data.Sampler):
        def __init__(self):
            self.indices = iter(range(8)).__iter__()
            self.lock = threading.Lock()

        def __iter__(self):
            return self.indices

    with pytest.raises(UserError, match="Sampler cannot be copied .*could not resume at its place"):
        as_source(data.DataLoader(plain(), 2, sampler=Held()))
