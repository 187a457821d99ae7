"""Draw a step's views: crops of the batch's images, and a mask for each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa import device_images, device_masks, tokens
from jaxtrain.systems.hjepa.config import AugmentationConfig


class View(NamedTuple):
    """Crops of one size, grouped by sample; without multi-crop the images themselves.

    images: float [batch * crops, channel, S, S]. mask: bool [batch * crops, patch], True = predict; masked: the same
    mask as index lists. valid: bool [batch * crops], False for padding.
    """

    images: Any
    mask: Any
    masked: tokens.Masked
    valid: Any
    crops: int


def views_of(model, batch, config, rngs) -> list[View]:
    """Return whole images in evaluation (rngs=None); in training the augmented global crops, then any local ones."""
    image_keys, mask_keys = sample_keys(batch["index"], rngs, config.seed)
    size, crops = config.data.image_size, config.data.augmentation
    if rngs is None:
        images = device_images.prepare(batch["image"], size)
        return [_view(model, config, images, batch.get("mask"), mask_keys, batch["valid"], 1)]
    small, patch = local_size(config), model.patch_size
    if crops.local_crops and small < patch:
        raise UserError(
            f"data.augmentation.local_size: a crop of {small} pixels holds no patch of {patch}; raise it, or lower "
            "model.vit.patch_size"
        )
    views, first = [], 0
    for suffix, count, side, scale in (
        ("", crops.global_crops, size, crops.crop_scale),
        ("_local", crops.local_crops, small, crops.local_scale),
    ):
        if count:
            keys = [crop_keys(sample, first, count) for sample in (image_keys, mask_keys)]
            images = _crops(batch, suffix, count, keys[0], side, scale, crops)
            mask = batch.get(f"mask{suffix}")
            mask = None if mask is None else mask.reshape(len(images), -1)
            views.append(_view(model, config, images, mask, keys[1], jnp.repeat(batch["valid"], count), count))
        first += count
    return views


def several_crops(config) -> bool:
    """Return True if a training image is cropped more than once."""
    return config.data.augmentation.global_crops > 1 or config.data.augmentation.local_crops > 0


def local_size(config) -> int:
    """Return the side of a local crop in pixels."""
    return config.data.augmentation.local_size or config.data.image_size // 2


def sample_keys(index, rngs, seed: int):
    """Return two keys per sample, derived from the step's key in training and from the seed alone in evaluation."""
    key = jax.random.key(seed) if rngs is None else rngs()
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i)))(index)
    return keys[:, 0], keys[:, 1]


def crop_keys(keys, first: int, count: int):
    """Return keys of crops `first` to `first + count` of every sample, [batch * count]; crop 0 has the sample's own."""
    folded = jax.vmap(jax.random.fold_in, (0, None))
    per_crop = [keys if crop == 0 else folded(keys, crop) for crop in range(first, first + count)]
    return jnp.stack(per_crop, axis=1).reshape(-1)


def _crops(batch, suffix: str, count: int, keys, side: int, scale, augmentation: AugmentationConfig):
    """Return the loader's crops if it cuts them, else cut them here from one image per sample."""
    if augmentation.where == "loader":
        crops = batch[f"image{suffix}"]
        return device_images.prepare(crops.reshape(-1, *crops.shape[-3:]), side)
    images, flip, color = batch["image"], augmentation.horizontal_flip, augmentation.color_jitter
    if images.dtype != jnp.uint8 and (count > 1 or suffix):
        raise UserError(
            f"data.augmentation: {augmentation.global_crops} global and {augmentation.local_crops} local crops are cut "
            f"from uint8 images; the dataset gives {images.dtype}. Give uint8 [channel, height, width], or one crop"
        )
    images = jnp.repeat(images, count, axis=0) if count > 1 else images
    return device_images.augment(images, keys, side, scale, flip, color)


def _view(model, config, images, mask, keys, valid, crops: int) -> View:
    """Mask the images: with the loader's masks if given, else with masks drawn here, one key each."""
    masking, side = config.masking, images.shape[-1]
    grid = side // model.patch_size
    blocks = device_masks.blocks_of(masking)
    count = device_masks.fixed_count(grid, blocks, masking.ratio) if masking.kind == "fixed" else None
    smallest = 1 << (model.num_hierarchies - 1)
    if count is not None and not smallest <= count < grid * grid:
        raise UserError(
            f"masking: {count} of {grid * grid} patches of {side} pixels' images are masked; {model.num_hierarchies} "
            f"levels need at least {smallest}. Raise masking.ratio or lower model.num_hierarchies"
        )
    if mask is None:
        mask = device_masks.draw(keys, grid, blocks, count)
    if count is not None:
        return View(images, mask, tokens.fixed_count(mask, count), valid, crops)
    length = max(smallest, device_masks.largest_count(grid, blocks))
    if config.compat == "original":
        return View(images, mask, tokens.padded_to_largest(mask, length, valid), valid, crops)
    return View(images, mask, tokens.ragged(mask, length), valid, crops)
