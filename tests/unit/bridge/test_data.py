"""torch data in: every kind of dataset and item, the same batches from any number of workers."""

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils import data

from jaxtrain.data import workers
from jaxtrain.data.collate import Columns, collate
from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader, make_pool, make_reader, make_stream
from jaxtrain.data.sample_reader import Request
from jaxtrain.data.sources import as_source
from jaxtrain.errors import DataError, UserError
from tests.unit.bridge import data_sets as sets
from torch_bridge.datasets import to_numpy


def loader(dataset, count: int = 0, batch_size: int = 8, training: bool = True, timeout_s: float = 60, shuffle=True):
    source = as_source(dataset)
    size = getattr(source, "batch_size", None) or batch_size
    stream = make_stream(source, size, 3, training, shuffle, False)
    pool = make_pool(make_reader(source, None, size, 3), count, timeout_s, "forkserver")
    return Loader(source, stream, lambda batches: batches[0], np.arange(size), pool=pool, timeout_s=timeout_s, seed=3)


def read(given: Loader, first: int, stop: int) -> list[dict]:
    """Host batches as they come, copied: views into shared memory live as long as they are held."""
    calls = [(step, 1) for step in range(first, stop)]
    batches = [pickle.loads(pickle.dumps(batch)) for _, _, batch in given.batches(calls)]
    given.close()
    return batches


def assert_same(first: list[dict], second: list[dict]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert pickle.dumps(_plain(a)) == pickle.dumps(_plain(b))


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return (str(value.dtype), value.shape, value.tobytes())


def test_items_of_every_kind_become_arrays():
    batch = loader(sets.Items(), shuffle=False).host_batch(0)
    assert batch["x"].dtype == np.float32
    assert batch["x"].shape == (8, 3)
    assert batch["half"].dtype == ml_dtypes.bfloat16
    assert batch["id"].dtype == np.int32
    assert batch["double"].dtype == np.float32
    assert batch["pair"][0].dtype == np.int32
    assert batch["pair"][1][0].dtype == np.int16
    assert batch["pair"][1][1].dtype == np.bool_
    for leaf in (batch["x"][:, 0], batch["half"][:, 0], batch["id"], batch["double"], batch["pair"][1][0][:, 0]):
        np.testing.assert_array_equal(leaf.astype(int), np.arange(8))


@pytest.mark.parametrize("dataset", [sets.Items(), sets.Drawing(), sets.Epochs()], ids=["items", "drawing", "epochs"])
def test_0_1_and_4_workers_give_identical_batches(dataset):
    steps = 2 * -(-len(dataset) // 8)
    alone = read(loader(dataset), 0, steps)
    for count in (1, 4):
        assert_same(alone, read(loader(dataset, count), 0, steps))


def test_augmentation_differs_between_samples_and_epochs_and_leaves_global_generators_alone():
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    batches = read(loader(sets.Drawing()), 0, 6)
    assert torch.rand(()) == expected
    drawn = np.concatenate([batch["0"][batch["0"][:, 0] % 2 == 1] for batch in batches])
    assert len(drawn) == 24
    assert len(np.unique(drawn[:, 1:])) == 72


def test_a_collate_function_that_draws_draws_anew_for_every_batch_and_the_same_after_a_resume():
    masked = lambda items: {"mask": torch.rand(len(items)).numpy()}
    source, stream = as_source(data.TensorDataset(torch.arange(64.0))), IndexStream(64, 8, 3)

    def drawn(first: int) -> np.ndarray:
        reader = make_reader(source, masked, 8, 3)
        batches = [stream.batch(step)[0] for step in range(first, 8)]
        return np.concatenate([reader(Request(0, indices, indices))["mask"] for indices in batches])

    whole = drawn(0)
    assert len(np.unique(whole)) == 64
    np.testing.assert_array_equal(whole[40:], drawn(5))


@pytest.mark.parametrize("count", [0, 2])
def test_a_run_goes_on_in_the_middle_of_an_epoch_by_position(count):
    whole = read(loader(sets.Drawing()), 0, 9)
    assert_same(whole[4:], read(loader(sets.Drawing(), count), 4, 9))


def test_datasets_are_told_the_epoch():
    batches = read(loader(sets.Epochs(), 2, batch_size=4), 0, 6)
    assert [set(batch["0"][:, 1]) for batch in batches] == [{0.0}, {0.0}, {1.0}, {1.0}, {2.0}, {2.0}]


def test_every_sample_comes_once_and_padding_is_marked():
    batches = read(loader(sets.Items(37), 2, training=False), 0, 5)
    ids = np.concatenate([batch["id"][batch["valid"]] for batch in batches])
    np.testing.assert_array_equal(np.sort(ids), np.arange(37))
    assert batches[-1]["valid"].sum() == 5


@pytest.mark.parametrize(("world", "count"), [(2, 0), (4, 0)])
def test_processes_share_every_global_batch_as_distributed_sampler_means_to(world, count):
    """Each process reads its rows; together they are the batch of one process, nothing lost or repeated."""
    source, stream = as_source(sets.Items(37)), IndexStream(37, 8, 3)
    whole = Loader(source, stream, lambda b: b[0], np.arange(8), seed=3)
    parts = [
        Loader(source, stream, lambda b: b[0], np.array_split(np.arange(8), world)[r], seed=3) for r in range(world)
    ]
    for step in range(5):
        together = np.concatenate([part.host_batch(step)["id"] for part in parts])
        np.testing.assert_array_equal(together, whole.host_batch(step)["id"])


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_sample_that_raises_is_named(count):
    with pytest.raises(DataError, match="the dataset raised at sample 13: KeyError: 'no such column'"):
        read(loader(sets.Trouble("raise"), count, shuffle=False), 0, 4)


def test_the_line_of_the_users_code_is_named():
    with pytest.raises(DataError, match="data_sets.py:.* in __getitem__"):
        read(loader(sets.Trouble("raise"), 1), 0, 4)


@pytest.mark.parametrize(("what", "how"), [("die", "was killed by SIGKILL"), ("exit", "ended with exit code 3")])
def test_a_worker_that_dies_is_named_with_its_sample(what, how):
    with pytest.raises(DataError, match=rf"worker \d .*{how} at sample 13"):
        read(loader(sets.Trouble(what), 2, shuffle=False), 0, 4)


@pytest.mark.parametrize("count", [0, 2])
def test_a_reader_that_hangs_is_named_with_its_sample(count):
    with pytest.raises(DataError, match=r"at sample 13 for more than 2 s \(data.timeout_s\)"):
        read(loader(sets.Trouble("hang"), count, shuffle=False, timeout_s=2), 0, 4)


def test_a_dataset_that_cannot_be_sent_is_refused_with_the_fix():
    dataset = sets.Items()
    dataset.transform = lambda x: x
    with pytest.raises(UserError, match="cannot be sent to worker processes.*data.num_workers=0"):
        read(loader(dataset, 1), 0, 1)


def test_fork_is_refused_while_jax_runs():
    import jax

    jax.devices()
    with pytest.raises(UserError, match="fork is not safe here, because JAX runs already.*forkserver"):
        workers.ProcessPool(make_reader(as_source(sets.Items()), None, 8, 0), 1, 10, "fork").start()
    assert (
        as_source(data.DataLoader(sets.Items(), 8, num_workers=1, multiprocessing_context="fork")).start_method
        == "fork"
    )


def test_workers_end_with_their_pool():
    given = loader(sets.Items(), 2)
    steps = given.batches([(step, 1) for step in range(5)])
    next(steps)
    processes = given.pool._processes.processes
    steps.close()
    assert all(process.is_alive() for process in processes)  # they stay for the next epoch
    assert len(read(given, 0, 5)) == 5
    assert not any(process.is_alive() for process in processes)


def test_batches_may_be_kept_without_end():
    """Held batches hold their memory; new ones get new memory, nothing waits."""
    given = loader(sets.Items(200), 2)
    kept = [batch for _, _, batch in given.batches([(step, 1) for step in range(25)])]
    ids = np.concatenate([batch["id"][batch["valid"]] for batch in kept])
    np.testing.assert_array_equal(np.sort(ids), np.arange(200))
    given.close()


@pytest.mark.parametrize("width", [6_000, 40_000])  # joined in one go, and copied row by row
def test_batches_read_without_workers_keep_their_values_while_they_are_held(width):
    given = loader([torch.full((width,), float(i)) for i in range(80)], shuffle=False)
    kept = [batch["0"] for _, _, batch in given.batches([(step, 1) for step in range(10)])]
    assert [batch[:, ::999].mean(1).tolist() for batch in kept] == np.arange(80.0).reshape(10, 8).tolist()


# --- whole DataLoaders -----------------------------------------------------------------------------------------------


def ids_of(batches) -> list[list[int]]:
    return [batch["id"][batch["valid"]].tolist() for batch in batches]


@pytest.mark.parametrize("count", [0, 2])
def test_a_loader_with_a_generator_gives_torchs_own_batches(count):
    make = lambda: data.DataLoader(sets.Items(), 8, shuffle=True, generator=torch.Generator().manual_seed(7))
    plain = make()
    expected = [batch["id"].tolist() for _ in range(3) for batch in plain]
    assert ids_of(read(loader(make(), count), 0, 15)) == expected
    assert ids_of(read(loader(make(), count), 7, 15)) == expected[7:]


def test_a_shuffling_loader_without_generator_depends_on_seed_and_epoch_alone():
    first = ids_of(read(loader(data.DataLoader(sets.Items(), 8, shuffle=True)), 0, 10))
    torch.manual_seed(99)
    assert ids_of(read(loader(data.DataLoader(sets.Items(), 8, shuffle=True)), 0, 10)) == first
    assert first[:5] != first[5:]


def test_samplers_and_batch_samplers_are_kept():
    weighted = data.SubsetRandomSampler([3, 5, 9, 11])
    ids = ids_of(read(loader(data.DataLoader(sets.Items(), 2, sampler=weighted)), 0, 2))
    assert sorted(sum(ids, [])) == [3, 5, 9, 11]
    batches = [[1, 2, 3], [7], [30, 31]]
    assert ids_of(read(loader(data.DataLoader(sets.Items(), batch_sampler=batches), 1), 0, 3)) == batches


@pytest.mark.parametrize("count", [0, 2])
def test_a_collate_fn_is_kept(count):
    batches = read(loader(data.DataLoader(sets.Items(), 8, collate_fn=sets.triple), count), 0, 5)
    np.testing.assert_array_equal(batches[1]["three"][:, 0], 3.0 * np.arange(8, 16))
    assert batches[1]["id"].dtype == np.int32


def test_a_worker_init_fn_is_kept():
    given = data.DataLoader(sets.Marked(), 4, num_workers=2, worker_init_fn=sets.mark_worker)
    batches = read(loader(given, 2), 0, 2)
    assert [set(batch["0"][:, 1]) for batch in batches] == [{100}, {101}]
    assert batches[0]["0"][0, 2] == 2


def test_a_distributed_samplers_shares_are_put_together():
    make = lambda rank: data.DistributedSampler(sets.Items(40), 4, rank, shuffle=True, seed=5)
    shares = [[batch["id"].tolist() for batch in data.DataLoader(sets.Items(40), 2, sampler=make(r))] for r in range(4)]
    expected = [sorted(sum((share[step] for share in shares), [])) for step in range(5)]
    ours = ids_of(read(loader(data.DataLoader(sets.Items(40), 2, sampler=make(2))), 0, 5))
    assert [sorted(ids) for ids in ours] == expected


# --- iterable datasets -----------------------------------------------------------------------------------------------


def values_of(batches) -> list[int]:
    return np.concatenate([batch["0"][batch["valid"]] for batch in batches]).astype(int).tolist()


@pytest.mark.parametrize("count", [0, 1, 4])
def test_an_iterable_dataset_comes_in_its_order_and_begins_again(count):
    batches = read(loader(sets.Alone(), count), 0, 6)
    assert values_of(batches) == 2 * list(range(21))
    assert batches[2]["valid"].sum() == 5


@pytest.mark.parametrize("counted", [False, True])
def test_an_iterable_dataset_resumes_where_it_was(counted):
    whole = values_of(read(loader(sets.Stream(counted=counted)), 0, 9))
    assert whole == [*range(21), *range(100, 121), *range(200, 221)]
    assert values_of(read(loader(sets.Stream(counted=counted), 1), 4, 9)) == whole[21 + 8 :]


def test_evaluation_passes_over_an_iterable_dataset_once():
    given = loader(sets.Alone(), training=False)
    batches = [batch for _, _, batch in given.batches((step, 1) for step in range(1 << 40))]
    assert values_of(batches) == list(range(21))


def test_an_iterable_loaders_own_workers_shard_as_in_torch():
    make = lambda: data.DataLoader(sets.Stream(), 4, num_workers=2, multiprocessing_context="forkserver")
    expected = [batch.tolist() for batch in make()]
    got = [batch["0"][batch["valid"]].tolist() for batch in read(loader(make(), 2), 0, len(expected))]
    assert got == expected


def test_batches_that_are_made_already_pass_as_they_are():
    items = [torch.arange(4 * i, 4 * i + 4) for i in range(3)]
    given = data.DataLoader(items, batch_size=None)
    assert values_of(read(loader(given, batch_size=4), 0, 3)) == list(range(12))


@pytest.mark.parametrize("size", [4, 40_000])  # joined in one go, and copied row by row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_size_and_dtype_make_the_batch_that_arrays_make(size, dtype):
    rows = [(torch.arange(size) % 7 + i).to(dtype).requires_grad_(dtype.is_floating_point) for i in range(3)]
    columns = Columns(3)
    for row in rows:
        columns.append({"x": row, "label": 1})
    batch, wanted = columns.batch(), collate([{"x": to_numpy(row), "label": 1} for row in rows])
    assert batch["x"].dtype == wanted["x"].dtype
    np.testing.assert_array_equal(batch["x"], wanted["x"])
    np.testing.assert_array_equal(batch["label"], wanted["label"])


def test_tensors_that_do_not_fit_together_are_refused_by_name():
    columns = Columns(2)
    for length in (3, 4):
        columns.append((torch.ones(length), 0))
    with pytest.raises(UserError, match=r"ragged: `0` has shape \[3\] in one item and \[4\] in another"):
        columns.batch()
