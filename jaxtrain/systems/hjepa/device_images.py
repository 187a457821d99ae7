"""Image transforms inside the compiled step: normalise, crop, flip, colour jitter; distributed like `transforms`.

Input: uint8 [batch, channel, Q, Q], squares at the source's own resolution. Output: float32 [batch, channel, S, S].
Float images pass through unchanged, because their dataset has already prepared them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.hjepa.transforms import MEAN, STD

CENTER = 1 / 1.14  # the evaluation transform resizes to 1.14 S and crops S
GREY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as Pillow and torchvision


def normalise(images):
    """Normalise [..., channel, S, S] in [0, 1]: ImageNet's statistics for three channels, else mean 0.5 and std 0.5."""
    if images.shape[-3] != 3:
        return (images - 0.5) / 0.5
    return (images - MEAN[:, None, None]) / STD[:, None, None]


def prepare(images, size: int):
    """Prepare images for evaluation as `eval_transform` does, from squares of any side; resize unless it is `size`."""
    if images.dtype != jnp.uint8:
        return images
    images = images.astype(jnp.float32) / 255
    if images.shape[-1] != size:
        side = images.shape[-1] * CENTER
        start = (images.shape[-1] - side) / 2
        images = jax.vmap(lambda image: _resample(image, (start, start), (side, side), size))(images)
        images = jnp.clip(images, 0, 1)
    return normalise(images)


def augment(images, keys, size: int, crop_scale, horizontal_flip: float, color_jitter: float):
    """Augment images for training: a random crop of a share of the area, a flip, colour jitter; one key per image."""
    if images.dtype != jnp.uint8:
        return images

    def one(image, key):
        crop_key, flip_key, color_key = jax.random.split(key, 3)
        image = image.astype(jnp.float32) / 255
        start, sides = _crop_box(crop_key, image.shape[-1], crop_scale)
        image = jnp.clip(_resample(image, start, sides, size), 0, 1)
        image = jnp.where(jax.random.uniform(flip_key) < horizontal_flip, image[..., ::-1], image)
        return jitter(image, color_key, color_jitter) if color_jitter > 0 and image.shape[0] == 3 else image

    return normalise(jax.vmap(one)(images, keys))


def _crop_box(key, side: int, scale, ratio=(3 / 4, 4 / 3)):
    """Return (top, left), (height, width) in pixels of the first of ten random boxes that fits, or the whole image."""
    areas, shapes, tops, lefts = jax.random.uniform(key, (40,)).reshape(4, 10)
    area = side * side * (scale[0] + areas * (scale[1] - scale[0]))
    aspect = jnp.exp(math.log(ratio[0]) + shapes * (math.log(ratio[1]) - math.log(ratio[0])))
    width, height = jnp.sqrt(area * aspect), jnp.sqrt(area / aspect)
    fits = (width <= side) & (height <= side)
    first = jnp.argmax(fits)
    pick = lambda values, other: jnp.where(fits.any(), values[first], other)
    height, width = pick(height, side), pick(width, side)
    return (pick(tops, 0.0) * (side - height), pick(lefts, 0.0) * (side - width)), (height, width)


def _resample(image, start, sides, size: int):
    """Resample a box of image [channel, Q, Q] to [channel, size, size], bicubic and antialiased.

    start: (top, left) of the box. sides: its (height, width).
    """
    scale = jnp.stack([size / jnp.asarray(side, jnp.float32) for side in sides])
    shift = -jnp.stack([jnp.asarray(s, jnp.float32) for s in start]) * scale
    shape = (image.shape[0], size, size)
    return jax.image.scale_and_translate(image, shape, (1, 2), scale, shift, method="cubic", antialias=True)


def jitter(image, key, strength: float):
    """Change brightness, contrast, saturation and hue by random factors in random order; image [3, S, S] in [0, 1].

    Source: torchvision ColorJitter(0.4 j, 0.4 j, 0.2 j, 0.1 j).
    """
    order_key, *factor_keys = jax.random.split(key, 5)
    bounds = (0.4 * strength, 0.4 * strength, 0.2 * strength)
    factors = [
        jax.random.uniform(k, minval=max(0.0, 1 - b), maxval=1 + b)
        for k, b in zip(factor_keys[:3], bounds, strict=True)
    ]
    turn = jax.random.uniform(factor_keys[3], minval=-0.1 * strength, maxval=0.1 * strength)
    changes = [
        lambda x: x * factors[0],
        lambda x: _blend(x, _grey(x).mean(), factors[1]),
        lambda x: _blend(x, _grey(x), factors[2]),
        lambda x: shift_hue(x, turn),
    ]
    order = jax.random.permutation(order_key, 4)
    for position in range(4):
        image = jnp.clip(jax.lax.switch(order[position], changes, image), 0, 1)
    return image


def _grey(image):
    return jnp.tensordot(GREY, image, 1)


def _blend(image, other, factor):
    return factor * image + (1 - factor) * other


def shift_hue(image, turn):
    """Rotate the hue of an RGB image [3, S, S] by `turn`, a fraction of the hue circle."""
    top, bottom = image.max(0), image.min(0)
    span = top - bottom
    safe = jnp.where(span > 0, span, 1.0)
    red, green, blue = image
    sector = jnp.where(
        top == red, (green - blue) / safe, jnp.where(top == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    hue = jnp.where(span > 0, sector / 6 + turn, 0.0) % 1.0
    # value - value * saturation * max(0, min(k, 4 - k, 1)), k = (n + 6 hue) mod 6: the closed form of HSV to RGB
    k = (jnp.array([5.0, 3.0, 1.0])[:, None, None] + 6 * hue) % 6
    return top - span * jnp.clip(jnp.minimum(k, 4 - k), 0, 1)
