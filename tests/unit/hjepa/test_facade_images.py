"""The original's image data sets by class, mixtures of them, and several crops of an image."""

import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image

from jaxtrain.systems import hjepa


@pytest.fixture
def folders(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                picture = Image.fromarray(rng.integers(0, 256, (44, 40, 3), np.uint8))
                picture.save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def cifar10(folder):
    rng, place = np.random.default_rng(1), folder / "cifar-10-batches-py"
    place.mkdir()
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        content = {b"data": rng.integers(0, 256, (2, 3072), np.uint8), b"labels": [3, 8]}
        (place / name).write_bytes(pickle.dumps(content))


def cifar100(folder):
    place = folder / "cifar-100-python"
    place.mkdir()
    content = {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [1, 0]}
    for name in ("train", "test"):
        (place / name).write_bytes(pickle.dumps(content))
    (place / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"apple", b"fish"]}))


def test_a_class_of_images_is_what_its_name_builds(folders):
    data = hjepa.ImageNetDataset(folders, "val", 32)
    assert (data.split, data.image_size, data.data_path, len(data)) == ("val", 32, folders, 6)
    assert (data.classes, data.class_to_idx) == (["cat", "dog"], {"cat": 0, "dog": 1})
    assert data.targets == [0, 0, 0, 1, 1, 1]
    other = hjepa.build_dataset("imagenet", folders, "val", 32)
    assert type(other) is hjepa.ImageNetDataset
    assert torch.equal(data[4][0], other[4][0])
    with Image.open(folders / "val/dog/1.png") as picture:
        assert torch.equal(data[4][0], hjepa.JEPAEvalTransform(32)(picture))


def test_a_transform_gets_the_picture(folders):
    sizes = hjepa.ImageNetDataset(folders, transform=lambda picture: (picture.size, picture.mode))
    assert sizes[0] == (((40, 44), "RGB"), 0)


def test_cifar_is_read_from_its_authors_files(tmp_path):
    cifar10(tmp_path)
    train, test = (hjepa.CIFAR10Dataset(tmp_path, split, 32) for split in ("train", "test"))
    assert (len(train), len(test), train[9][1], test.classes[8]) == (10, 2, 8, "ship")
    torch.manual_seed(0)
    first = train[0][0]
    torch.manual_seed(0)
    assert torch.equal(train[0][0], first)
    assert first.shape == (3, 32, 32)
    cifar100(tmp_path)
    fine = hjepa.CIFAR100Dataset(tmp_path, "test", 32)
    assert ([label for _, label in fine], fine.classes) == ([1, 0], ["apple", "fish"])


def test_unlabelled_images_of_stl_have_no_label(tmp_path):
    place = tmp_path / "stl10_binary"
    place.mkdir()
    np.zeros((2, 3, 96, 96), np.uint8).tofile(place / "unlabeled_X.bin")
    data = hjepa.STL10Dataset(tmp_path, "unlabeled", 32)
    assert [label for _, label in data] == [-1, -1]


def test_unknown_arguments_of_a_dataset_are_named(folders):
    with pytest.raises(ValueError, match="size: unknown; known: data_path, split, image_size"):
        hjepa.build_dataset("imagenet", folders, size=3)


def test_weights_decide_how_often_a_dataset_is_drawn():
    random.seed(0)
    data = hjepa.WeightedMultiDataset([list("ab"), list("cdefg")], [3, 1], ["few", "many"])
    assert (len(data), data.total_size, data.cumulative_sizes, data.num_datasets) == (5, 7, [2, 7], 2)
    drawn = [data[0] for _ in range(2000)]
    assert set(drawn) == {("a", 0), ("b", 0), *((letter, 1) for letter in "cdefg")}
    assert 0.72 < sum(number == 0 for _, number in drawn) / 2000 < 0.78
    assert data.get_dataset_stats()["few"] == {"size": 2, "weight": 0.75}
    flat = hjepa.WeightedMultiDataset([list("ab"), list("cd")], [9, 1], temperature=2.0)
    assert flat.weights == pytest.approx([0.75, 0.25])
    with pytest.raises(ValueError, match="wanted 2 weights"):
        hjepa.WeightedMultiDataset([list("ab"), list("cd")], [1, -1])


def test_a_balanced_mixture_has_as_many_of_each():
    data = hjepa.BalancedMultiDataset([list("ab"), list("cdefg")])
    assert sorted(number for _, number in data) == [0, 0, 1, 1]
    before = list(data)
    assert before == list(data)
    random.seed(3)
    data.resample_indices()
    assert list(data) != before


def test_mixtures_are_built_by_name(folders):
    config = [{"name": "imagenet", "weight": 1}, {"name": "imagenet", "path": str(folders)}]
    built = {
        strategy: hjepa.build_multi_dataset(config, folders, "val", strategy, image_size=32)
        for strategy in ("weighted", "balanced", "concat")
    }
    assert {name: len(data) for name, data in built.items()} == {"weighted": 6, "balanced": 12, "concat": 12}
    assert [len(data[0]) for data in built.values()] == [3, 3, 2]
    with pytest.raises(ValueError, match="sampling_strategy='x' is unknown"):
        hjepa.build_multi_dataset(config, folders, sampling_strategy="x")


def test_crops_have_their_sizes_and_numbers(folders):
    options = {"global_crop_size": 32, "local_crop_size": 16, "num_local_crops": 3}
    data = hjepa.build_multicrop_dataset("imagenet", folders, "train", **options)
    assert (data.num_global_crops, data.num_local_crops, data.total_crops, data.classes) == (2, 3, 5, ["cat", "dog"])
    loader = hjepa.build_multicrop_dataloader(data, 2, num_workers=0, shuffle=False)
    crops, labels = next(iter(loader))
    assert [tuple(crop.shape) for crop in crops] == [(2, 3, 32, 32)] * 2 + [(2, 3, 16, 16)] * 3
    assert labels.tolist() == [0, 0]
    bare = hjepa.MultiCropDataset(data.base_dataset, data.transform, return_labels=False)
    assert len(hjepa.multicrop_collate_fn([bare[0], bare[1]])) == 5
    torch.manual_seed(0)
    first = data[0][0]
    torch.manual_seed(0)
    assert all(map(torch.equal, first, data[0][0]))


def test_small_crops_grow_in_number_over_the_warm_up():
    picture = Image.new("RGB", (40, 40))
    crops = hjepa.build_multicrop_transform(global_crop_size=16, local_crop_size=8, adaptive=True, warmup_epochs=4)
    counts = []
    for epoch in range(6):
        crops.set_epoch(epoch)
        counts.append(len(crops(picture)) - 2)
    assert counts == [2, 4, 6, 8, 10, 10]
    assert hjepa.AdaptiveMultiCropTransform().num_local_crops == 10
    assert hjepa.MultiCropEvalTransform(16)(picture).shape == (3, 16, 16)
    with pytest.raises(ValueError, match="mean, std"):
        hjepa.MultiCropTransform(mean=(0, 0, 0))
