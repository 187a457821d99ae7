"""The original's multi-crop transforms and data sets: several crops of each image. Source: Caron et al. 2020."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.datasets import build_dataset
from jaxtrain.systems.hjepa.original.features import BICUBIC, JEPAEvalTransform, check_transform
from jaxtrain.systems.hjepa.original.sequences import build_dataloader
from jaxtrain.systems.hjepa.transforms import train_transform

Scale = tuple[float, float]


class MultiCropTransform:
    """Return a list of crops of a PIL image, the large ones first: float32 [3, S, S] each, drawn by torch's generator.

    Each crop is cut from the whole image (`*_scale`: shares of its area), flipped, colour-jittered and normalised.
    Raises ValueError for another interpolation, mean or std.
    """

    def __init__(
        self,
        global_crop_size: int = 224,
        local_crop_size: int = 96,
        num_global_crops: int = 2,
        num_local_crops: int = 6,
        global_crop_scale: Scale = (0.4, 1.0),
        local_crop_scale: Scale = (0.05, 0.4),
        interpolation: Any = BICUBIC,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        global_color_jitter: float = 0.4,
        local_color_jitter: float = 0.4,
        horizontal_flip_prob: float = 0.5,
    ):
        check_transform(interpolation, mean, std)
        self.global_crop_size, self.local_crop_size = global_crop_size, local_crop_size
        self.num_global_crops, self.num_local_crops = num_global_crops, num_local_crops
        crop = lambda size, color, scale: train_transform(
            size, color, tuple(scale), horizontal_flip_prob, presize=False
        )
        self.global_transform = crop(global_crop_size, global_color_jitter, global_crop_scale)
        self.local_transform = crop(local_crop_size, local_color_jitter, local_crop_scale)

    def __call__(self, image: Any) -> list[torch.Tensor]:
        rng = np.random.default_rng(int(torch.randint(1 << 31, ())))
        kinds = [self.global_transform] * self.num_global_crops + [self.local_transform] * self.num_local_crops
        return [torch.from_numpy(crop(image, rng)) for crop in kinds]


class AdaptiveMultiCropTransform(MultiCropTransform):
    """MultiCropTransform whose small crops grow in number over warmup_epochs, linearly; call set_epoch.

    kwargs: arguments of MultiCropTransform, without num_local_crops.
    """

    def __init__(self, min_local_crops: int = 2, max_local_crops: int = 10, warmup_epochs: int = 0, **kwargs: Any):
        if "num_local_crops" in kwargs:
            raise UserError("num_local_crops: min_local_crops and max_local_crops say how many")
        super().__init__(**kwargs)
        self.min_local_crops, self.max_local_crops = min_local_crops, max_local_crops
        self.warmup_epochs = warmup_epochs
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of small crops to that of an epoch, counted from 0."""
        self.current_epoch = epoch
        share = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        self.num_local_crops = self.min_local_crops + int(share * (self.max_local_crops - self.min_local_crops))


class MultiCropEvalTransform(JEPAEvalTransform):
    """JEPAEvalTransform: one crop of the centre, float32 [3, S, S]."""

    def __init__(
        self,
        crop_size: int = 224,
        interpolation: Any = BICUBIC,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
    ):
        super().__init__(crop_size, interpolation, mean, std)


class MultiCropDataset(Dataset):
    """base_dataset's (PIL image, label) as (crops, label), or as crops alone without return_labels."""

    def __init__(self, base_dataset: Any, multicrop_transform: Any, return_labels: bool = True):
        self.base_dataset, self.multicrop_transform = base_dataset, multicrop_transform
        self.return_labels = return_labels

    def __len__(self) -> int:
        return len(self.base_dataset)

    def __getitem__(self, index: int) -> Any:
        image, label = self.base_dataset[index]
        crops = self.multicrop_transform(image)
        return (crops, label) if self.return_labels else crops

    def set_epoch(self, epoch: int) -> None:
        """Tell an adaptive transform the epoch; others do not change."""
        if hasattr(self.multicrop_transform, "set_epoch"):
            self.multicrop_transform.set_epoch(epoch)

    @property
    def classes(self) -> list[str]:
        return self.base_dataset.classes

    @property
    def num_global_crops(self) -> int:
        return self.multicrop_transform.num_global_crops

    @property
    def num_local_crops(self) -> int:
        return self.multicrop_transform.num_local_crops

    @property
    def total_crops(self) -> int:
        return self.num_global_crops + self.num_local_crops


class MultiCropDatasetRaw(MultiCropDataset):
    """A data set of `build_dataset` by name as (crops, label). multicrop_config: of `build_multicrop_transform`."""

    def __init__(
        self,
        dataset_name: str,
        data_path: str | pathlib.Path,
        split: str = "train",
        multicrop_config: Mapping[str, Any] | None = None,
        download: bool = True,
    ):
        base = build_dataset(dataset_name, data_path, split, download=download, transform=lambda image: image)
        super().__init__(base, build_multicrop_transform(**(multicrop_config or {})))
        self.dataset_name, self.data_path, self.split = dataset_name, data_path, split

    @property
    def transform(self) -> Any:
        return self.multicrop_transform


def multicrop_collate_fn(batch: Sequence[Any]) -> Any:
    """Return a list with one tensor [batch, 3, S, S] per crop, and int [batch] labels if items have them."""
    if isinstance(batch[0], tuple):
        crops, labels = zip(*batch, strict=True)
        return multicrop_collate_fn(crops), default_collate(list(labels))
    return [torch.stack(crop) for crop in zip(*batch, strict=True)]


def build_multicrop_transform(
    num_global_crops: int = 2,
    num_local_crops: int = 6,
    global_crop_size: int = 224,
    local_crop_size: int = 96,
    global_crop_scale: Scale = (0.4, 1.0),
    local_crop_scale: Scale = (0.05, 0.4),
    global_color_jitter: float = 0.4,
    local_color_jitter: float = 0.4,
    adaptive: bool = False,
    min_local_crops: int = 2,
    max_local_crops: int = 10,
    warmup_epochs: int = 0,
) -> MultiCropTransform:
    """Return a MultiCropTransform, or with `adaptive` an AdaptiveMultiCropTransform, without num_local_crops."""
    options = {
        "num_global_crops": num_global_crops,
        "global_crop_size": global_crop_size,
        "local_crop_size": local_crop_size,
        "global_crop_scale": global_crop_scale,
        "local_crop_scale": local_crop_scale,
        "global_color_jitter": global_color_jitter,
        "local_color_jitter": local_color_jitter,
    }
    if adaptive:
        return AdaptiveMultiCropTransform(min_local_crops, max_local_crops, warmup_epochs, **options)
    return MultiCropTransform(num_local_crops=num_local_crops, **options)


def build_multicrop_dataset(
    dataset_name: str,
    data_path: str | pathlib.Path,
    split: str = "train",
    num_global_crops: int = 2,
    num_local_crops: int = 6,
    global_crop_size: int = 224,
    local_crop_size: int = 96,
    global_crop_scale: Scale = (0.4, 1.0),
    local_crop_scale: Scale = (0.05, 0.4),
    global_color_jitter: float = 0.4,
    local_color_jitter: float = 0.4,
    adaptive: bool = False,
    download: bool = True,
    **kwargs: Any,
) -> MultiCropDatasetRaw:
    """Return a MultiCropDatasetRaw. kwargs: further arguments of `build_multicrop_transform`."""
    crops = (num_global_crops, num_local_crops, global_crop_size, local_crop_size, global_crop_scale, local_crop_scale)
    names = tuple(build_multicrop_transform.__annotations__)[: len(crops)]
    config = dict(zip(names, crops, strict=True)) | {"adaptive": adaptive, **kwargs}
    config |= {"global_color_jitter": global_color_jitter, "local_color_jitter": local_color_jitter}
    return MultiCropDatasetRaw(dataset_name, data_path, split, config, download)


def build_multicrop_dataloader(
    dataset: Dataset,
    batch_size: int,
    num_workers: int = 4,
    pin_memory: bool = True,
    shuffle: bool = True,
    drop_last: bool = True,
    **kwargs: Any,
) -> DataLoader:
    """Return `build_dataloader` with `multicrop_collate_fn`."""
    options = {"shuffle": shuffle, "drop_last": drop_last, "collate_fn": multicrop_collate_fn}
    return build_dataloader(dataset, batch_size, num_workers, pin_memory, **(options | kwargs))
