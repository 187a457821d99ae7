"""Data of the pre-training task: one source per split, built from the `data` settings."""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from jaxtrain.data.sources import ArraySource
from jaxtrain.errors import UserError
from jaxtrain.nn.vit import overrides, vit_size
from jaxtrain.systems.hjepa import device_masks
from jaxtrain.systems.hjepa import image_sources as images
from jaxtrain.systems.hjepa.config import DATASETS
from jaxtrain.systems.hjepa.masks import (
    HierarchicalMaskGenerator,
    MultiBlockMaskGenerator,
    MultiCropMaskGenerator,
    training_mask,
)
from jaxtrain.systems.hjepa.transforms import train_transform
from jaxtrain.systems.hjepa.views import local_size, several_crops

FOLDERS = {"train": "train", "validation": "val", "test": "test"}


def build_data(config, split: str):
    """Return the source of a split, or None if the dataset has none; "test" needs a `test` folder in data.path."""
    if split not in ("train", "validation") and not (split == "test" and _folder(config.data).is_dir()):
        return None
    data = config.data
    if data.datasets:
        parts = [_one(config, part.name, part.path or data.path, split, in_memory=False) for part in data.datasets]
        weights = [part.weight for part in data.datasets]
        source = images.Mixture(parts, weights, data.sampling_strategy, data.temperature, config.seed)
    else:
        source = _one(config, data.dataset, data.path, split, in_memory=config.masking.where == "device")
    if config.masking.where == "device":
        return source
    return WithMasks(source, config, crops=split == "train" and several_crops(config))


def example(config):
    """Return made-up images with the shapes of the training data, read and masked alike; for digits, the real ones."""
    data = config.data
    if data.dataset == "digits" and not data.datasets:
        return build_data(config, "train")
    sides = {"cifar10": 32, "cifar100": 32, "stl10": 96}  # datasets held in memory at their own resolution
    side = sides.get(data.dataset, data.image_size)
    pixels = np.broadcast_to(np.uint8(0), (data.batch_size, 3, side, side))
    labels, read = np.zeros(data.batch_size, np.int32), _reader(config, "train")
    source = images.ArrayImages(pixels, labels, read)
    if config.masking.where == "device":
        return ArraySource({"image": pixels, "label": labels}, batched=True) if data.dataset in sides else source
    return WithMasks(source, config, crops=several_crops(config))


def _folder(data) -> pathlib.Path:
    return pathlib.Path(data.path) / "test"


def _one(config, name: str, path: str, split: str, in_memory: bool):
    """Return the source of one dataset. in_memory: return small datasets as columns, which may live on the device."""
    size, root = config.data.image_size, pathlib.Path(path)
    read = _reader(config, split)
    if name in ("imagenet", "folder", "imagenet100"):
        folder = root / FOLDERS[split]
        return images.ImageFolder(
            folder, read, listed_classes(config.data.class_list, folder) if name == "imagenet100" else None
        )
    if name not in ("digits", "cifar10", "cifar100", "stl10"):
        raise UserError(f"data.datasets: {name!r} is unknown; known: {', '.join(DATASETS)}")
    if name == "digits" and split == "train" and config.data.augmentation.where == "loader":
        raise UserError(
            "data.augmentation.where: loader has no transform for digits; set data.augmentation.where=device"
        )
    pixels, labels = _arrays(name, path, split, config.data.validation_ratio)
    if in_memory and not isinstance(read, (images.ReadAugmented, images.ReadCrops)):
        if split != "train" and pixels.shape[-1] != size:
            pixels = np.stack([read(image.transpose(1, 2, 0), 0) for image in pixels])
        return ArraySource({"image": pixels, "label": labels}, batched=True)
    return images.ArrayImages(pixels, labels, _plain if name == "digits" else read)


@functools.lru_cache(maxsize=4)
def _arrays(name: str, path: str, split: str, validation_ratio: float):
    if name == "digits":
        return images.read_digits(validation_ratio, split)
    if name == "stl10":
        return images.read_stl10(pathlib.Path(path), split)
    return images.read_cifar(pathlib.Path(path), name, split)


def _plain(image, index: int) -> np.ndarray:
    return images.channels_first(np.asarray(image))


def _reader(config, split: str):
    size, augmentation = config.data.image_size, config.data.augmentation
    if split != "train":
        return images.ReadEvaluation(size)
    if augmentation.where == "device":
        return images.ReadSquare(size + 32)
    color, flip = augmentation.color_jitter, augmentation.horizontal_flip
    if not several_crops(config):
        return images.ReadAugmented(train_transform(size, color, augmentation.crop_scale, flip), config.seed)
    large = train_transform(size, color, augmentation.crop_scale, flip, presize=False)
    small = train_transform(local_size(config), color, augmentation.local_scale, flip, presize=False)
    return images.ReadCrops(large, small, augmentation.global_crops, augmentation.local_crops, config.seed)


def listed_classes(path: str | pathlib.Path | None, folder: pathlib.Path) -> tuple[str, ...] | None:
    """Return the class folders of ImageNet-100 that data.class_list names, one per line; None (all) if there are 100.

    Raises UserError if the list is needed and unset, or cannot be read.
    """
    if path is None:
        count = sum(entry.is_dir() for entry in folder.iterdir()) if folder.is_dir() else 100
        if count != 100:
            raise UserError(
                f"{folder}: holds {count} class folders, so data.dataset=imagenet100 needs data.class_list, a file "
                "with the names of its 100, one per line"
            )
        return None
    try:
        names = pathlib.Path(path).read_text().split()
    except OSError as error:
        raise UserError(f"data.class_list: {path} cannot be read: {error.strerror}") from None
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class WithMasks:
    """Source that adds "mask" to each item: bool [patch], or with several crops bool [crop, patch] and "mask_local".

    crops: True if items have several crops. Masks are seeded by (seed, epoch, sample). With `masking.kind: fixed` each
    mask is trimmed or filled to one count.
    """

    source: Any
    config: Any
    crops: bool

    def __post_init__(self):
        if self.crops and self.config.masking.generator != "hierarchical":
            raise UserError(
                f"masking.generator: {self.config.masking.generator} draws no masks of several crops in the loader; "
                "set masking.where=device, or masking.generator=hierarchical"
            )

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict:
        rng = np.random.RandomState(
            np.random.SeedSequence([self.config.seed, getattr(index, "epoch", 0), int(index)]).generate_state(4)
        )
        if self.crops:
            masks = {name: self._counted(drawn, rng) for name, drawn in self._multi_crop(rng).items()}
        else:
            masks = {"mask": self._counted(self._single(rng), rng)[0]}
        return self.source[index] | masks

    def _counted(self, masks: np.ndarray, rng) -> np.ndarray:
        """Trim or fill masks, bool [crop, patch], to the fixed count; return them unchanged for other kinds."""
        masking = self.config.masking
        if masking.kind != "fixed":
            return masks
        grid = round(masks.shape[1] ** 0.5)
        count = device_masks.fixed_count(grid, device_masks.blocks_of(masking), masking.ratio)
        order = 2 * masks + rng.uniform(size=masks.shape)
        fixed = np.zeros(masks.shape, bool)
        np.put_along_axis(fixed, np.argsort(-order, axis=1)[:, :count], True, axis=1)
        return fixed

    def _sizes(self, side: int) -> dict:
        patch = self._patch()
        return {"input_size": side // patch * patch, "patch_size": patch}

    def _patch(self) -> int:
        return vit_size(self.config.model.encoder_type, **overrides(self.config.model.vit)).patch_size

    def _single(self, rng) -> np.ndarray:
        """Return the union of an image's targets, bool [1, patch]."""
        masking, sizes = self.config.masking, self._sizes(self.config.data.image_size)
        common = {"num_target_masks": masking.num_masks, "aspect_ratio_range": masking.aspect_ratio, "rng": rng}
        if masking.generator == "multi_block":
            _, targets = MultiBlockMaskGenerator(**sizes, **common, target_scale=masking.mask_scale)(1)
            return targets.any(1)
        return training_mask(
            HierarchicalMaskGenerator(**sizes, **common, num_hierarchies=1, base_scale=masking.mask_scale)(1)
        )

    def _multi_crop(self, rng) -> dict[str, np.ndarray]:
        """Return the masks of the global and the local crops, bool [crop, patch] each.

        "cross_crop_prediction" masks only the first half of the local crops, so the generator draws twice as many.
        """
        masking, augmentation = self.config.masking, self.config.data.augmentation
        drawn = MultiCropMaskGenerator(
            self._sizes(self.config.data.image_size)["input_size"],
            self._sizes(local_size(self.config))["input_size"],
            augmentation.global_crops,
            2 * augmentation.local_crops,
            self._patch(),
            self.config.model.num_hierarchies,
            masking.num_masks,
            "cross_crop_prediction",
            base_scale=masking.mask_scale,
            aspect_ratio_range=masking.aspect_ratio,
            rng=rng,
        )(1)
        local = [drawn["local_masks"][f"crop_{i}"] for i in range(augmentation.local_crops)]
        masks = {"mask": drawn["global_masks"].values()} | ({"mask_local": local} if local else {})
        return {name: np.concatenate([training_mask(crop) for crop in crops]) for name, crops in masks.items()}
