"""Masks: the original's tables, and the batched version's distribution."""

import json
import pathlib

import jax
import numpy as np
import pytest

from jaxtrain.systems.hjepa import device_masks, masks

CASES = json.loads((pathlib.Path(__file__).parents[2] / "golden" / "hjepa" / "masks.json").read_text())["cases"]
SCALE, ASPECT = (0.05, 0.15), (0.75, 1.5)
LEVEL_0 = device_masks.Blocks(4, SCALE, (0.85, 1.15))
MULTI_BLOCK = device_masks.Blocks(4, SCALE, ASPECT, 4)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "statistics" in case])
def test_statistics_equal_the_originals(name):
    case = CASES[name]
    generator = getattr(masks, case["class"])(**case["kwargs"], rng=np.random.RandomState(case["np_random_seed"]))
    drawn = generator(case["batch_size"])
    got = generator.get_mask_statistics(*drawn) if isinstance(drawn, tuple) else generator.get_mask_statistics(drawn)
    flat = lambda d: [v for x in d.values() for v in (flat(x) if isinstance(x, dict) else [x])]
    np.testing.assert_allclose(flat(got), flat(case["statistics"]), atol=1e-6)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "level_configs" in case])
def test_levels_scale_as_the_originals(name):
    case = CASES[name]
    levels = masks.HierarchicalMaskGenerator(**case["kwargs"]).level_configs
    for ours, theirs in zip(levels, case["level_configs"], strict=True):
        assert {key: list(value) if isinstance(value, tuple) else value for key, value in ours.items()} == theirs


def _device(count, samples=1500, grid=14, blocks=LEVEL_0):
    keys = jax.random.split(jax.random.key(0), samples)
    return np.asarray(device_masks.draw(keys, grid, blocks, count)).reshape(samples, grid, grid)


def _level_0(count):
    options = {"base_scale": SCALE, "aspect_ratio_range": ASPECT, "rng": np.random.RandomState(0)}
    return masks.training_mask(masks.HierarchicalMaskGenerator(224, 16, 1, 4, **options)(count))


def _multi_block(count):
    options = {"target_scale": SCALE, "aspect_ratio_range": ASPECT, "rng": np.random.RandomState(0)}
    return masks.MultiBlockMaskGenerator(224, 16, 4, **options)(count)[1].any(1)


@pytest.mark.parametrize(("numpys", "blocks"), [(_level_0, LEVEL_0), (_multi_block, MULTI_BLOCK)])
def test_device_masks_cover_each_patch_as_often_as_numpy_masks_do(numpys, blocks):
    numpy_cover = numpys(1500).reshape(-1, 14, 14).mean(0)
    device_cover = _device(None, blocks=blocks).mean(0)
    assert abs(numpy_cover.mean() - device_cover.mean()) < 0.01
    assert np.abs(numpy_cover - device_cover).max() < 0.06  # 4.5 standard errors of 1,500 samples


def test_every_fixed_mask_has_the_same_count():
    counts = _device(78, samples=64).sum((1, 2))
    assert set(counts) == {78}


def test_fixed_masks_keep_the_blocks_they_started_from():
    keys = jax.random.split(jax.random.key(3), 32)
    ragged = np.asarray(device_masks.draw(keys, 14, LEVEL_0, None))
    fixed = np.asarray(device_masks.draw(keys, 14, LEVEL_0, 78))
    smaller = np.minimum(ragged.sum(1), fixed.sum(1))
    assert ((ragged & fixed).sum(1) == smaller).all()


@pytest.mark.parametrize("blocks", [LEVEL_0, MULTI_BLOCK])
def test_no_ragged_mask_exceeds_the_announced_bound(blocks):
    bound = device_masks.largest_count(14, blocks)
    assert _device(None, blocks=blocks).sum((1, 2)).max() <= bound


def test_a_mask_depends_on_its_own_key_only():
    keys = jax.random.split(jax.random.key(0), 8)
    whole = device_masks.draw(keys, 8, LEVEL_0, 20)
    part = device_masks.draw(keys[5:6], 8, LEVEL_0, 20)
    np.testing.assert_array_equal(whole[5:6], part)
