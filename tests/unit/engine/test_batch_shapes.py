"""How batches of many lengths are brought to few sizes, and how it is seen what a collate function pads with."""

import numpy as np
import pytest

from jaxtrain.data.batch_shapes import Axis, BatchShapes, NotPadded, axes_of, ladder

IDS = Axis("ids", 1, 0, 0, False)


def batch(length: int, rows: int = 4) -> dict:
    return {"ids": np.ones((rows, length), np.int32)}


def test_the_ladder_has_powers_of_two_and_the_halves_between():
    assert [ladder(n) for n in (1, 8, 9, 13, 17, 25, 100, 129)] == [8, 8, 12, 16, 24, 32, 128, 192]


@pytest.mark.parametrize("seed", range(20))
def test_two_independent_lengths_take_at_most_eight_shapes_and_none_is_new_after_an_epoch(seed):
    draw = np.random.default_rng(seed)
    axes = [IDS, Axis("labels", 1, 1, -100, False)]
    shapes = BatchShapes(axes, 4, 50)
    lengths = draw.integers(1, 600, (50, 2))
    for step in range(150):
        rows = 2 if step % 50 == 49 else 4
        first, second = draw.permuted(lengths, axis=0)[step % 50] if step >= 50 else lengths[step]
        given = batch(first, rows) | {"labels": np.ones((rows, second), np.int32)}
        got = shapes.fit(step, given)
        assert got["ids"].shape[1] >= first
        assert got["labels"].shape[1] >= second
    assert len(shapes.sizes) <= 8
    assert max(size.step for size in shapes.sizes) < 50


def test_first_sizes_are_less_than_half_as_long_again():
    shapes = BatchShapes([IDS], 4, 1000)
    for step, length in enumerate([9, 17, 33, 65]):
        assert shapes.fit(step, batch(length))["ids"].shape[1] < length * 1.5


def test_no_size_goes_beyond_what_the_model_takes():
    shapes = BatchShapes([IDS], 4, 10, holds=lambda arrays: arrays["ids"].shape[1] <= 70)
    assert shapes.fit(0, batch(67))["ids"].shape == (4, 70)


def test_sizes_that_later_steps_have_added_are_forgotten_on_resume():
    shapes = BatchShapes([IDS], 4, 10)
    for step, length in enumerate([9, 30, 100]):
        shapes.fit(step, batch(length))
    resumed = BatchShapes([IDS], 4, 10)
    resumed.restore(shapes.state(), step=2)
    assert resumed.sizes == shapes.sizes[:2]


def seen(collate, lengths=(3, 5, 9), pad_values=None) -> dict:
    items = [np.arange(1, n + 1) for n in lengths]
    together = lambda *chosen: collate([items[i] for i in chosen])
    return {axis.name: axis for axis in axes_of(together, len(items), pad_values or {})}


def pad(rows, value, left=False):
    longest = max(map(len, rows))
    widths = lambda row: (longest - len(row), 0) if left else (0, longest - len(row))
    return np.stack([np.pad(row, widths(row), constant_values=value) for row in rows])


def test_values_and_sides_are_seen_from_the_collate_function():
    found = seen(
        lambda rows: {"ids": pad(rows, 7, left=True), "mask": pad([row * 0 + 1 for row in rows], 0, left=True)}
    )
    assert {name: (axis.value, axis.left) for name, axis in found.items()} == {"ids": (7, True), "mask": (0, True)}


def test_a_square_mask_is_padded_along_both_axes():
    def collate(rows):
        longest = max(map(len, rows))
        square = np.full((len(rows), longest, longest), -9.0)
        for number, row in enumerate(rows):
            square[number, : len(row), : len(row)] = np.outer(row, row)
        return {"square": square}

    items = [np.arange(1, n + 1) for n in (3, 5)]
    axes = axes_of(lambda *chosen: collate([items[i] for i in chosen]), 2, {})
    assert [(axis.axis, axis.group, axis.value, axis.left) for axis in axes] == [
        (1, 0, -9.0, False),
        (2, 0, -9.0, False),
    ]


def test_random_entries_take_the_side_where_one_value_stands():
    draw = np.random.default_rng(0)
    found = seen(lambda rows: {"ids": pad([draw.integers(1, 99, len(row)) for row in rows], 0)})
    assert (found["ids"].value, found["ids"].left) == (0, False)


def test_what_is_filled_up_with_several_values_must_be_declared():
    counting = lambda rows: {"positions": np.stack([np.arange(max(map(len, rows))) for _ in rows])}
    with pytest.raises(NotPadded, match="declare one in data.pad_values"):
        seen(counting, lengths=(3, 9))
    assert seen(counting, (3, 9), {"positions": 5})["positions"].value == 5


def test_samples_of_one_length_vary_nowhere():
    assert seen(lambda rows: {"ids": np.stack(rows)}, lengths=(4, 4)) == {}
