"""Sources and transforms: what comes out of files, and the two ways to augment."""

import colorsys
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

from jaxtrain import config_io
from jaxtrain.data.index_stream import SampleIndex
from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa import device_images
from jaxtrain.systems.hjepa.data import build_data
from jaxtrain.systems.hjepa.transforms import MEAN, STD, crop_box, eval_transform

RNG = np.random.default_rng(0)


def config(*overrides):
    return config_io.load("configs/hjepa_tiny.yaml", list(overrides))[1]


@pytest.fixture
def folder(tmp_path):
    """Two classes with three pictures each under train/ and val/."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = RNG.integers(0, 255, (50, 72, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def test_a_folder_gives_squares_to_train_and_the_evaluation_crop_to_validate(folder):
    overrides = (f"data.path={folder}", "data.dataset=folder", "data.image_size=32", "model.vit.in_chans=3")
    train, validation = (build_data(config(*overrides), split) for split in ("train", "validation"))
    assert [len(train), train[0]["image"].shape, train[5]["label"]] == [6, (3, 64, 64), 1]
    picture = Image.open(sorted((folder / "val" / "cat").iterdir())[0])
    mine = (validation[0]["image"].transpose(1, 2, 0) / 255 - MEAN) / STD
    np.testing.assert_allclose(mine.transpose(2, 0, 1), eval_transform(32)(picture), atol=1e-6)


def test_augmentation_in_the_loader_follows_seed_epoch_and_sample(folder):
    overrides = (f"data.path={folder}", "data.dataset=folder", "data.image_size=32", "model.vit.in_chans=3")
    train = build_data(config(*overrides, "data.augmentation.where=loader"), "train")
    first, again, later = (train[SampleIndex.of(2, epoch)]["image"] for epoch in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - later).max() > 0.1


def test_a_missing_folder_is_one_clear_message(tmp_path):
    with pytest.raises(UserError, match="no class folders"):
        build_data(config(f"data.path={tmp_path}", "data.dataset=folder"), "train")


def test_cifar_reads_its_published_layout(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    pixels = RNG.integers(0, 255, (4, 3072), dtype=np.uint8)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        content = pickle.dumps({b"data": pixels, b"labels": [3, 1, 4, 1]}, protocol=2)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    source = build_data(config("data.dataset=cifar10", f"data.path={tmp_path}", "data.image_size=32"), "train")
    assert (len(source), source[0]["image"].shape, int(source[2]["label"])) == (20, (3, 32, 32), 4)
    np.testing.assert_array_equal(source[1]["image"].reshape(-1), pixels[1])


def test_a_cifar_file_that_runs_code_is_refused(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(print))
    with pytest.raises(UserError, match="no array"):
        build_data(config("data.dataset=cifar10", f"data.path={tmp_path}", "data.image_size=32"), "validation")


def test_stl10_stores_columns_first(tmp_path):
    (tmp_path / "stl10_binary").mkdir()
    pixels = RNG.integers(0, 255, (2, 3, 96, 96), dtype=np.uint8)
    pixels.tofile(tmp_path / "stl10_binary" / "train_X.bin")
    np.array([1, 10], np.uint8).tofile(tmp_path / "stl10_binary" / "train_y.bin")
    source = build_data(config("data.dataset=stl10", f"data.path={tmp_path}", "data.image_size=96"), "train")
    np.testing.assert_array_equal(source[1]["image"], pixels[1].transpose(0, 2, 1))
    assert [int(source[i]["label"]) for i in range(2)] == [0, 9]


@pytest.mark.parametrize(("strategy", "length"), [("concat", 9), ("balanced", 6), ("weighted", 6)])
def test_a_mixture_has_the_originals_length(folder, tmp_path, strategy, length):
    (tmp_path / "other" / "train" / "owl").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(RNG.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(tmp_path / f"other/train/owl/{i}.png")
    parts = f"[{{name: folder, path: {folder}, weight: 1}}, {{name: folder, path: {tmp_path / 'other'}, weight: 3}}]"
    source = build_data(
        config(f"data.datasets={parts}", f"data.sampling_strategy={strategy}", "data.image_size=32"), "train"
    )
    items = [source[SampleIndex.of(i, 0)] for i in range(len(source))]
    assert len(items) == length
    epochs = [source[SampleIndex.of(i, epoch)] for epoch in range(8) for i in range(len(source))]
    assert {item["dataset"] for item in epochs} == {0, 1}


def test_a_mixture_is_augmented_anew_in_every_epoch(folder):
    overrides = (f"data.datasets=[{{name: folder, path: {folder}}}]", "data.augmentation.where=loader")
    source = build_data(config(*overrides, "data.image_size=32"), "train")
    first, later = (source[SampleIndex.of(1, epoch)]["image"] for epoch in (0, 1))
    assert np.abs(first - later).max() > 0.1


def test_loader_masks_have_one_count_and_change_with_the_epoch():
    source = build_data(config("masking.where=loader"), "train")
    first, later = source[SampleIndex.of(0, 0)]["mask"], source[SampleIndex.of(0, 1)]["mask"]
    assert first.sum() == later.sum() == 6
    assert any((source[SampleIndex.of(i, 0)]["mask"] != source[SampleIndex.of(i, 1)]["mask"]).any() for i in range(4))


def test_device_crops_have_the_areas_and_places_of_pillow_crops():
    keys = jax.random.split(jax.random.key(0), 4000)
    (top, left), (height, width) = jax.vmap(lambda key: device_images._crop_box(key, 64, (0.3, 1.0)))(keys)
    boxes = np.array([crop_box((64, 64), (0.3, 1.0), np.random.default_rng(i)) for i in range(4000)])
    wanted = [boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]]
    for got, want in zip((top, left, height, width), wanted, strict=True):
        assert abs(float(got.mean()) - want.mean()) < 1.0
        assert abs(float(got.std()) - want.std()) < 0.6


def test_a_crop_of_everything_at_its_own_size_changes_nothing():
    image = jnp.asarray(RNG.uniform(size=(3, 16, 16)).astype(np.float32))
    np.testing.assert_allclose(device_images._resample(image, (0.0, 0.0), (16.0, 16.0), 16), image, atol=1e-5)


def test_preparing_on_the_device_is_near_the_evaluation_transform():
    smooth = Image.fromarray(RNG.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize((96, 96), Image.Resampling.BICUBIC)
    square = np.asarray(smooth).transpose(2, 0, 1)[None]
    got = device_images.prepare(jnp.asarray(square), 32)[0]
    assert np.abs(np.asarray(got) - eval_transform(32)(smooth)).mean() < 0.05  # of a standard deviation


def test_hue_turns_as_in_colorsys():
    image = RNG.uniform(size=(3, 4, 4)).astype(np.float32)
    got = np.asarray(device_images.shift_hue(jnp.asarray(image), 0.2))
    for y in range(4):
        for x in range(4):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[:, y, x])
            np.testing.assert_allclose(got[:, y, x], colorsys.hsv_to_rgb((hue + 0.2) % 1, saturation, value), atol=1e-5)


def test_sequences_skip_short_files_and_start_anywhere(tmp_path):
    from jaxtrain.systems.hjepa.sequences import SequenceFiles

    for name, length in (("a", 9), ("b", 3)):
        content = {"frames": torch.arange(length)[:, None, None, None].float(), "actions": torch.zeros(length, 2)}
        torch.save(content, tmp_path / f"{name}.pt")
    every = SequenceFiles(tmp_path, 4, random_window=False)
    assert [float(every[i]["frames"][0, 0, 0, 0]) for i in range(len(every))] == [0, 1, 2, 3, 4, 5]
    drawn = SequenceFiles(tmp_path, 4, random_window=True)
    starts = {float(drawn[SampleIndex.of(0, epoch)]["frames"][0, 0, 0, 0]) for epoch in range(20)}
    assert len(drawn) == 1
    assert len(starts) > 3
