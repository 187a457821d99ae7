"""The original's DeiT-III augmentations: RandAugment, erased boxes, mixed batches. Source: Touvron et al. 2022."""

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.features import BICUBIC, JEPAEvalTransform, check_transform
from jaxtrain.systems.hjepa.transforms import as_image, jitter, resize_shorter, to_array

ENHANCERS = {
    "Brightness": ImageEnhance.Brightness,
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Sharpness": ImageEnhance.Sharpness,
}
AFFINE = {"ShearX": (1, 0.3), "ShearY": (3, 0.3), "TranslateX": (2, 150 / 331), "TranslateY": (5, 150 / 331)}
PADDING = 4


def generator() -> np.random.Generator:
    """Make a generator that follows torch's."""
    return np.random.default_rng(int(torch.randint(1 << 31, ())))


class RandAugment:
    """Apply num_ops of `augment_ops`, drawn with torch's generator, to a PIL image. Source: Cubuk et al. 2020.

    magnitude: of num_magnitude_bins steps, always in the positive direction, with torchvision's ranges. fill: colour of
    what comes into view, black by default.
    """

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: Any = "bilinear",
        fill: Any = None,
    ):
        if not 0 <= magnitude < num_magnitude_bins:
            raise UserError(f"magnitude={magnitude} is outside [0, {num_magnitude_bins})")
        self.num_ops, self.magnitude, self.num_magnitude_bins = num_ops, magnitude, num_magnitude_bins
        self.interpolation, self.fill = interpolation, fill
        plain = ("Identity", "Rotate", "Posterize", "Solarize", "AutoContrast", "Equalize")
        self.augment_ops = [*plain, *AFFINE, *ENHANCERS]

    def __call__(self, image: Image.Image) -> Image.Image:
        image = as_image(image)
        for number in torch.randint(len(self.augment_ops), (self.num_ops,)).tolist():
            image = self.apply(image, self.augment_ops[number])
        return image

    def apply(self, image: Image.Image, name: str) -> Image.Image:
        """Apply one operation of `augment_ops`."""
        share = self.magnitude / (self.num_magnitude_bins - 1)
        resample = Image.Resampling[str(getattr(self.interpolation, "value", self.interpolation)).upper()]
        if name in AFFINE:
            slot, largest = AFFINE[name]
            move = share * largest * (image.size[slot == 5] if slot in (2, 5) else 1)
            matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
            matrix[slot] = -float(int(move)) if slot in (2, 5) else move  # Pillow maps the result to the source
            return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=self.fill)
        if name in ENHANCERS:
            return ENHANCERS[name](image).enhance(1 + 0.9 * share)
        if name == "Rotate":
            return image.rotate(30 * share, resample, fillcolor=self.fill)
        if name == "Posterize":
            return ImageOps.posterize(image, 8 - round(4 * share))
        if name == "Solarize":
            return ImageOps.solarize(image, 255 * (1 - share))
        return {"AutoContrast": ImageOps.autocontrast, "Equalize": ImageOps.equalize}.get(name, as_image)(image)


class RandomErasing(nn.Module):
    """Replace a random box of an image [..., H, W] by `value`, with probability `prob`; torchvision's, draw for draw.

    scale: shares of the area. ratio: height over width. value: a number, one per channel, or "random". Source: Zhong et
    al. 2017.
    """

    def __init__(
        self,
        prob: float = 0.25,
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
        value: Any = 0,
        inplace: bool = False,
    ):
        super().__init__()
        self.prob, self.scale, self.ratio, self.value, self.inplace = prob, scale, ratio, value, inplace

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if torch.rand(1) >= self.prob:
            return image
        high, wide = image.shape[-2:]
        lowest, highest = (math.log(ratio) for ratio in self.ratio)
        for _ in range(10):
            area = high * wide * torch.empty(1).uniform_(*self.scale).item()
            aspect = torch.exp(torch.empty(1).uniform_(lowest, highest)).item()
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if not (h < high and w < wide):
                continue
            new = torch.empty(image.shape[-3], h, w).normal_() if self.value == "random" else torch.tensor(self.value)
            row, column = (int(torch.randint(0, rest + 1, (1,))) for rest in (high - h, wide - w))
            image = image if self.inplace else image.clone()
            image[..., row : row + h, column : column + w] = new if new.ndim != 1 else new[:, None, None]
            return image
        return image


class _Mixed(abc.ABC):
    """A transform of a batch, with probability `prob`: (images [batch, C, H, W], labels) -> images, [batch, class].

    labels: int [batch], or rows that sum to 1. Numbers follow torch's generator.
    """

    def __init__(self, alpha: float, num_classes: int = 1000, prob: float = 1.0):
        self.alpha, self.num_classes, self.prob = alpha, num_classes, prob

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = labels if labels.ndim == 2 else nn.functional.one_hot(labels.long(), self.num_classes)
        rows = rows.to(images.dtype)
        if self.alpha <= 0 or torch.rand(()) >= self.prob:
            return images, rows
        share = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
        other = torch.randperm(len(images)).to(images.device)
        images, share = self.mix(images, images[other], share)
        return images, share * rows + (1 - share) * rows[other]

    @abc.abstractmethod
    def mix(self, images: torch.Tensor, others: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        """Return the mixed images, and the share of the first in each."""


class Mixup(_Mixed):
    """Weighted means of pairs of images and labels. Source: Zhang et al. 2018."""

    def __init__(self, alpha: float = 0.8, num_classes: int = 1000, prob: float = 1.0):
        super().__init__(alpha, num_classes, prob)

    def mix(self, images: torch.Tensor, others: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        return share * images + (1 - share) * others, share


class CutMix(_Mixed):
    """A box of another image in each image; labels in proportion to the areas. Source: Yun et al. 2019."""

    def __init__(self, alpha: float = 1.0, num_classes: int = 1000, prob: float = 1.0):
        super().__init__(alpha, num_classes, prob)

    def mix(self, images: torch.Tensor, others: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        edges = []
        for size in images.shape[-2:]:
            half, middle = int(size * math.sqrt(1 - share)) // 2, int(torch.randint(size, ()))
            edges.append(slice(max(0, middle - half), min(size, middle + half)))
        images = images.clone()
        images[:, :, edges[0], edges[1]] = others[:, :, edges[0], edges[1]]
        area = math.prod(edge.stop - edge.start for edge in edges)
        return images, 1 - area / math.prod(images.shape[-2:])


class MixupCutmix:
    """CutMix with probability switch_prob, else Mixup, for `prob` of the batches."""

    def __init__(
        self,
        mixup_alpha: float = 0.8,
        cutmix_alpha: float = 1.0,
        num_classes: int = 1000,
        prob: float = 1.0,
        switch_prob: float = 0.5,
    ):
        self.mixup, self.cutmix = Mixup(mixup_alpha, num_classes, prob), CutMix(cutmix_alpha, num_classes, prob)
        self.prob, self.switch_prob = prob, switch_prob

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.cutmix if torch.rand(()) < self.switch_prob else self.mixup)(images, labels)


class DeiTIIIAugmentation:
    """DeiT-III's augmentation: `image_transform` of a PIL image, `batch_transform` of (images, labels).

    Resize to 1.14 S, random crop of S from the image with a border of 4, flip, RandAugment, colour jitter (its strength
    as JEPATransform's), normalise, erase a box. Raises ValueError for another interpolation, mean or std.
    """

    def __init__(
        self,
        image_size: int = 224,
        color_jitter: float | None = 0.4,
        auto_augment: bool = True,
        rand_aug_num_ops: int = 2,
        rand_aug_magnitude: int = 9,
        interpolation: Any = BICUBIC,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        random_erasing_prob: float = 0.25,
        random_erasing_scale: tuple[float, float] = (0.02, 0.33),
        random_erasing_ratio: tuple[float, float] = (0.3, 3.3),
        mixup_alpha: float = 0.8,
        cutmix_alpha: float = 1.0,
        mixup_cutmix_prob: float = 1.0,
        mixup_switch_prob: float = 0.5,
        num_classes: int = 1000,
    ):
        check_transform(interpolation, mean, std)
        self.image_size, self.color_jitter, self.auto_augment = image_size, color_jitter, auto_augment
        self.mean, self.std, self.num_classes = mean, std, num_classes
        self.augment = RandAugment(rand_aug_num_ops, rand_aug_magnitude) if auto_augment else as_image
        self.erase = RandomErasing(random_erasing_prob, random_erasing_scale, random_erasing_ratio)
        self.image_transform = self._augmented
        self.batch_transform = MixupCutmix(mixup_alpha, cutmix_alpha, num_classes, mixup_cutmix_prob, mixup_switch_prob)

    def get_image_transform(self) -> Any:
        return self.image_transform

    def get_batch_transform(self) -> MixupCutmix:
        return self.batch_transform

    def _augmented(self, image: Any) -> torch.Tensor:
        rng, size = generator(), self.image_size
        image = ImageOps.expand(resize_shorter(as_image(image), int(size * 1.14)), PADDING)
        x, y = (int(rng.integers(0, side - size + 1)) for side in image.size)
        image = image.crop((x, y, x + size, y + size))
        if rng.uniform() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = self.augment(image)
        if self.color_jitter:
            image = jitter(image, self.color_jitter, rng)
        return self.erase(torch.from_numpy(to_array(image)))


class DeiTIIIEvalTransform(JEPAEvalTransform):
    """JEPAEvalTransform: resize to 1.14 S, crop the centre, normalise: float32 [3, S, S]."""


def build_deit3_transform(is_training: bool = True, config: Mapping[str, Any] | None = None) -> Any:
    """Build a DeiTIIIAugmentation, or for evaluation a DeiTIIIEvalTransform, with the arguments in `config`."""
    if is_training:
        return DeiTIIIAugmentation(**(config or {}))
    read = ("image_size", "interpolation", "mean", "std")
    return DeiTIIIEvalTransform(**{name: value for name, value in (config or {}).items() if name in read})
