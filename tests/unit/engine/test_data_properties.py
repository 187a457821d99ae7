"""Index stream, splits, packing and masks, over random sizes and numbers of processes."""

import jax
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader
from jaxtrain.data.sources import ArraySource
from jaxtrain.systems.criteria_evidence import splits as posts
from jaxtrain.systems.digits.data import split_indices
from jaxtrain.systems.hjepa.masks import BlockSampler
from jaxtrain.systems.memory_lm.packing import IGNORE, pack
from jaxtrain.systems.set_completion import data as builds
from jaxtrain.systems.set_completion.masking import PADDING, hide

PROPERTY = settings(max_examples=100, deadline=None, database=None)
streams = st.builds(
    IndexStream,
    size=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    shuffle=st.booleans(),
)


@PROPERTY
@given(streams, st.integers(0, 5))
def test_every_epoch_visits_every_sample_once(stream, epoch):
    steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
    visited = np.concatenate([indices[valid] for indices, valid in map(stream.batch, steps)])
    assert sorted(visited) == list(range(stream.size))


@PROPERTY
@given(streams, st.integers(1, 5), st.data())
def test_dropping_the_last_batch_loses_less_than_a_batch_and_pads_nothing(stream, epoch, data):
    assume(stream.size >= stream.batch_size)
    short = IndexStream(stream.size, stream.batch_size, stream.seed, stream.shuffle, drop_last=True)
    place = data.draw(st.integers(0, short.steps_per_epoch - 1))
    assert short.batch(epoch * short.steps_per_epoch + place)[1].all()
    assert 0 <= stream.size - short.steps_per_epoch * stream.batch_size < stream.batch_size


@PROPERTY
@given(
    processes=st.integers(1, 8), rows_each=st.integers(1, 5), micro_batches=st.integers(1, 4), size=st.integers(1, 200),
    seed=st.integers(0, 1000), step=st.integers(0, 500),
)  # fmt: skip
def test_processes_and_micro_batches_slice_one_global_batch(processes, rows_each, micro_batches, size, seed, step):
    micro = processes * rows_each
    stream = IndexStream(size, micro * micro_batches, seed)
    source = ArraySource({"x": np.arange(size) ** 2})
    whole = Loader(source, stream, None, np.arange(stream.batch_size)).host_batch(step)
    together: dict[int, tuple] = {}
    for process in range(processes):
        own = np.arange(rows_each) + process * rows_each
        rows = np.concatenate([i * micro + own for i in range(micro_batches)])
        part = Loader(source, stream, None, rows).host_batch(step)
        together |= {int(r): tuple(part[k][i] for k in sorted(part)) for i, r in enumerate(rows)}
    assert together == {r: tuple(whole[k][r] for k in sorted(whole)) for r in range(stream.batch_size)}


@PROPERTY
@given(st.integers(10, 500), st.floats(0.05, 0.9), st.integers(0, 99))
def test_splits_are_disjoint_and_whole(size, ratio, seed):
    digits = [split_indices(size, ratio, name) for name in ("train", "validation")]
    random = posts.random_split(size, seed, (1 - ratio, ratio / 2, ratio / 2)).values()
    sets = builds.split_rows(size, 1.0, seed, ratio / 2, ratio / 2).values()
    for split in (digits, random, sets):
        assert sorted(int(row) for part in split for row in part) == list(range(size))


@settings(PROPERTY, max_examples=50)
@given(st.lists(st.integers(0, 60), min_size=80, max_size=200), st.integers(0, 99))
def test_a_group_is_in_one_split(groups, seed):
    assume(len(set(groups)) >= 10)
    split = posts.group_split([str(group) for group in groups], seed)
    assert sorted(row for rows in split.values() for row in rows) == list(range(len(groups)))
    posts.check_disjoint({name: [groups[row] for row in rows] for name, rows in split.items()})


@PROPERTY
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(2, 24), st.booleans())
def test_packing_keeps_documents_apart_and_tokens_in_order(lengths, length, split):
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(a + 1, b + 1) for a, b in zip(starts, starts[1:], strict=False)]  # no token twice
    columns = pack([(ids, ids) for ids in documents], length, pad_token_id=0, split=split)
    document_of = {int(token): i for i, ids in enumerate(documents) for token in ids}
    seen: list[int] = []
    for row in range(len(columns["input_ids"])):
        segments = columns["segment_ids"][row]
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            tokens = columns["input_ids"][row][here]
            assert len(tokens) >= 2
            assert (np.diff(tokens) == 1).all()
            assert len({document_of[int(token)] for token in tokens}) == 1
            assert (columns["position_ids"][row][here] == np.arange(len(tokens))).all()
            assert (columns["labels"][row][here] == tokens).all()
            seen += tokens.tolist()
        assert (columns["labels"][row][segments == 0] == IGNORE).all()
    assert len(seen) == len(set(seen))
    kept = [sum(token in set(seen) for token in ids.tolist()) for ids in documents]
    for ids, count in zip(documents, kept, strict=True):
        whole = len(ids) if split else min(len(ids), length)
        assert count in ((0,) if len(ids) < 2 else (whole, whole - 1) if split else (whole,))


@PROPERTY
@given(
    st.integers(2, 14), st.integers(1, 5), st.floats(0.05, 0.6), st.floats(0.3, 1.0), st.integers(0, 999)
)  # fmt: skip
def test_context_and_target_patches_do_not_overlap(grid, targets, target_scale, context_scale, seed):
    sampler = BlockSampler(grid * 4, 4, (0.5, 2.0), 10, 4, np.random.RandomState(seed))
    context, blocks = sampler.sample(targets, (target_scale, target_scale), (context_scale, context_scale))
    assert context.shape == (grid * grid,)
    assert blocks.shape == (targets, grid * grid)
    assert blocks.any(axis=1).all()
    assert not (context & blocks.any(axis=0)).any()


@settings(PROPERTY, max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=4), st.integers(0, 999), st.permutations(range(4)))
def test_what_is_hidden_depends_on_the_sample_alone(lengths, seed, order):
    targets = np.full((4, 12), PADDING, np.int32)
    for row, length in enumerate(lengths):
        targets[row, :length] = np.arange(length)
    index, order = np.arange(4) + 100, np.array(order)
    hidden = np.asarray(hide(targets, index, jax.random.key(seed)))
    assert (np.asarray(hide(targets[order], index[order], jax.random.key(seed))) == hidden[order]).all()
    for row, length in zip(hidden, lengths, strict=True):
        seen = row[row != PADDING]
        assert set(seen.tolist()) <= set(range(length))
        assert len(seen) < length or length == 0
        assert len(seen) >= 1 or length < 2
