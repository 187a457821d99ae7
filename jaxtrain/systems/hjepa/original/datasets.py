"""The original's data sets and loaders: torch Datasets of (image float32 [channel, S, S], int label)."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.config import DATASETS
from jaxtrain.systems.hjepa.data import build_data
from jaxtrain.systems.hjepa.device_images import normalise
from jaxtrain.systems.hjepa.image_sources import ImageFolder, cifar100_names
from jaxtrain.systems.hjepa.original import legacy_config

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
STL10 = "airplane bird car cat deer dog horse monkey ship truck".split()


class Images(Dataset):
    """One split of a config's data, augmented in training as in the original, with torch's random numbers.

    source: the same images before augmentation.
    """

    def __init__(self, config: Any, split: str):
        """config: a checked `hjepa.pretrain` config. split: "train", "validation" or "test"."""
        self._data, self.size, self.split = config.data, config.data.image_size, split
        self.source = build_data(config, split)
        self._items: Any = self.source
        if split == "train" and config.data.dataset != "digits":
            augmentation = config.data.augmentation.model_copy(update={"where": "loader"})
            data = config.data.model_copy(update={"augmentation": augmentation})
            self._items = build_data(config.model_copy(update={"data": data}), split)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def classes(self) -> list[str]:
        """Return the class names by label. Raises UserError for several datasets or if no file lists the names."""
        if isinstance(self.source, ImageFolder):
            return list(self.source.names)  # pyright: ignore[reportAttributeAccessIssue]
        if self._data.datasets:
            raise UserError("classes: several datasets at once have no common class names")
        if self._data.dataset == "cifar100":
            return cifar100_names(pathlib.Path(self._data.path))
        return list({"cifar10": CIFAR10, "stl10": STL10, "digits": map(str, range(10))}[self._data.dataset])

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        index = range(len(self))[index]
        item = self._items[_Drawn(index)] if self.split == "train" else self._items[index]
        image = np.asarray(item["image"])
        if image.dtype == np.uint8:
            image = normalise(image.astype(np.float32) / 255)
        tensor = torch.from_numpy(np.array(image, np.float32))
        if tensor.shape[-1] != self.size:
            sides = (self.size, self.size)
            tensor = functional.interpolate(tensor[None], sides, mode="bicubic", antialias=True)[0]
        return tensor, int(item.get("label", -1))


class _Drawn(int):
    """Index with a random `epoch` from torch's generator, so that every access draws a new augmentation."""

    @property
    def epoch(self) -> int:
        return int(torch.randint(1 << 31, ()))


def build_dataset(
    dataset_name: str,
    data_path: str | pathlib.Path,
    split: str = "train",
    image_size: int = 224,
    color_jitter: float = 0.4,
    download: bool = True,
    *,
    class_list: str | pathlib.Path | None = None,
    **kwargs: Any,
) -> Images:
    """Return a split of imagenet, imagenet100, cifar10, cifar100 or stl10 in data_path, in its authors' layout.

    split: train, or val or test. download: no effect; nothing is downloaded. kwargs: UserError names any other
    argument. class_list: for imagenet100 among other folders, a file with the names of its 100 classes, one per line,
    which are numbered from 0. Raises ValueError for an unknown name, and FileNotFoundError if data_path or a split's
    folder of classes is missing.
    """
    if kwargs:
        raise UserError(f"build_dataset: {', '.join(kwargs)}: unknown; known: class_list")
    name = dataset_name.lower()
    if name not in DATASETS:
        raise UserError(f"dataset_name={dataset_name!r} is unknown; known: {', '.join(DATASETS)}")
    if name != "digits" and not pathlib.Path(data_path).is_dir():
        raise FileNotFoundError(f"data_path: {data_path} is no folder")
    data = {"dataset": name, "data_path": str(data_path), "image_size": image_size}
    data["augmentation"] = {"color_jitter": color_jitter}
    config = checked({"data": data})
    if class_list is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"class_list": str(class_list)})})
    return Images(config, "train" if split == "train" else "validation")


def create_train_loader(config: Mapping[str, Any]) -> DataLoader:
    """Return a loader of the training split of the config's `data` section: shuffled, whole batches only."""
    return _loader(config, "train", shuffle=True, drop_last=True)


def create_val_loader(config: Mapping[str, Any]) -> DataLoader:
    """Return a loader of the validation split of the config's `data` section; it keeps the last, short batch."""
    return _loader(config, "validation")


def _loader(config: Mapping[str, Any], split: str, **options: Any) -> DataLoader:
    data = config.get("data") or {}
    workers = data.get("num_workers", 0)
    method = {"multiprocessing_context": "forkserver"} if workers else {}  # JAX's threads do not survive a fork
    images = Images(checked(config), split)
    return DataLoader(images, batch_size=data.get("batch_size", 128), num_workers=workers, **method, **options)


def checked(config: Mapping[str, Any]) -> Any:
    """Convert the original's nested config to this project's settings. Raises UserError that lists every mistake."""
    from jaxtrain import config_io

    return config_io.check(legacy_config.convert(config), "the original's config")[1]
