"""Image transforms with Pillow that reproduce torchvision's. Output: channels first, float32, normalised."""

import dataclasses
import math

import numpy as np
from PIL import Image, ImageEnhance

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def as_image(value) -> Image.Image:
    """Convert a PIL image or uint8 [height, width, 3] or [height, width] to an RGB image."""
    return (value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value))).convert("RGB")


def resize_shorter(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side to `size`, bicubic, antialiased; the longer side is rounded down, as in torchvision."""
    width, height = image.size
    if width <= height:
        shape = (size, int(size * height / width))
    else:
        shape = (int(size * width / height), size)
    return image if shape == image.size else image.resize(shape, Image.Resampling.BICUBIC)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    x, top = int(round((width - size) / 2)), int(round((height - size) / 2))
    return image.crop((x, top, x + size, top + size))


def to_array(image: Image.Image) -> np.ndarray:
    """Return float32 [3, height, width], normalised with ImageNet's mean and standard deviation."""
    x = np.asarray(image, np.float32) / np.float32(255)
    return np.ascontiguousarray(((x - MEAN) / STD).transpose(2, 0, 1))


@dataclasses.dataclass(frozen=True)
class eval_transform:
    """Resize the shorter side to 1.14 S, crop the centre, normalise. uint8 [height, width, 3] -> float32 [3, S, S]."""

    image_size: int

    def __call__(self, image) -> np.ndarray:
        return to_array(self.crop(image))

    def crop(self, image) -> Image.Image:
        return center_crop(resize_shorter(as_image(image), int(self.image_size * 1.14)), self.image_size)


@dataclasses.dataclass(frozen=True)
class train_transform:
    """Resize to S + 32 (unless presize is off), random crop of a share of the area, flip, colour jitter, normalise.

    color_jitter j: brightness and contrast 0.4 j, saturation 0.2 j, hue 0.1 j. The generator passed in makes all draws.
    """

    image_size: int
    color_jitter: float = 0.4
    crop_scale: tuple[float, float] = (0.8, 1.0)
    horizontal_flip: float = 0.5
    presize: bool = True

    def __call__(self, image, rng: np.random.Generator) -> np.ndarray:
        image = as_image(image)
        image = resize_shorter(image, self.image_size + 32) if self.presize else image
        image = image.resize(
            (self.image_size,) * 2, Image.Resampling.BICUBIC, box=crop_box(image.size, self.crop_scale, rng)
        )
        if rng.uniform() < self.horizontal_flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.color_jitter > 0:
            image = jitter(image, self.color_jitter, rng)
        return to_array(image)


def crop_box(size: tuple[int, int], scale, rng, ratio=(3 / 4, 4 / 3)) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of a random crop, drawn like torchvision's RandomResizedCrop.

    After ten failed attempts it is the largest centred crop of an allowed shape.
    """
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = int(round(math.sqrt(area * aspect))), int(round(math.sqrt(area / aspect)))
        if 0 < w <= width and 0 < h <= height:
            x, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
            return x, top, x + w, top + h
    shape = width / height
    w = int(round(height * ratio[1])) if shape > ratio[1] else width
    h = int(round(width / ratio[0])) if shape < ratio[0] else height
    x, top = (width - w) // 2, (height - h) // 2
    return x, top, x + w, top + h


def jitter(image: Image.Image, strength: float, rng) -> Image.Image:
    """Change brightness, contrast, saturation, hue by random factors in random order, as torchvision's ColorJitter."""
    enhancers = [(ImageEnhance.Brightness, 0.4), (ImageEnhance.Contrast, 0.4), (ImageEnhance.Color, 0.2)]
    for kind in rng.permutation(4):
        if kind < 3:
            enhancer, share = enhancers[kind]
            bound = share * strength
            image = enhancer(image).enhance(rng.uniform(max(0, 1 - bound), 1 + bound))
        else:
            image = shift_hue(image, rng.uniform(-0.1 * strength, 0.1 * strength))
    return image


def shift_hue(image: Image.Image, turn: float) -> Image.Image:
    """Rotate the hue by `turn`, a fraction of the hue circle."""
    hue, saturation, value = image.convert("HSV").split()
    shifted = (np.asarray(hue, np.int16) + int(turn * 255)) % 256
    return Image.merge("HSV", (Image.fromarray(shifted.astype(np.uint8)), saturation, value)).convert("RGB")
