"""Lists of masked patches: from boolean masks to indices, and pooling along the list.

A batch holds lists of one static length. `present` marks, per sample, the leading entries that take part: all of them
where every mask has the same count, the sample's own count for ragged masks, the batch's largest count under
`compat: original` (whose padding entries point at patch 0 and act as genuine tokens).
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxtrain import nn
from jaxtrain.nn import avg_pool1d


class Masked(NamedTuple):
    """indices: int [batch, masked], ascending patches, then 0. real: bool [batch, masked], False for padding.
    count: entries that take part: an int for all samples, or int [batch]."""

    indices: jnp.ndarray
    real: jnp.ndarray
    count: jnp.ndarray | int

    def present(self, level: int = 0):
        """bool [batch, masked // 2^level]: pooled entries whose whole window takes part. None where all do."""
        length = self.indices.shape[1] >> level
        if isinstance(self.count, int):
            return None if self.count >> level >= length else jnp.arange(length) < (self.count >> level)
        return jnp.arange(length) < (self.count >> level)[:, None]


def masked_patches(mask, length: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    """The first `length` True positions of mask [batch, patch], ascending and padded with 0; and which are real."""
    patches = mask.shape[1]
    ordered = jnp.sort(jnp.where(mask, jnp.arange(patches), patches), axis=1)[:, :length]
    real = ordered < patches
    return jnp.where(real, ordered, 0), real


def fixed_count(mask, count: int) -> Masked:
    """For masks that all hold `count` patches."""
    indices, real = masked_patches(mask, count)
    return Masked(indices, real, count)


def ragged(mask, length: int) -> Masked:
    """For masks of any counts up to `length`: padding is hidden from attention and loss."""
    indices, real = masked_patches(mask, length)
    return Masked(indices, real, real.sum(1))


def padded_to_largest(mask, length: int, valid=None) -> Masked:
    """As the original pads: to the batch's largest count, padding taking part. valid: bool [batch], rows that count."""
    indices, real = masked_patches(mask, length)
    counts = real.sum(1) if valid is None else jnp.where(valid, real.sum(1), 0)
    return Masked(indices, real, jnp.broadcast_to(counts.max(), counts.shape))


def gather(tokens, indices):
    """tokens [batch, patch, width] at indices [batch, masked]."""
    return nn.tokens(tokens, indices)


def pool(x, level: int):
    """Mean of 2^level neighbouring entries of [batch, token, width]; the remainder is dropped."""
    return x if level == 0 else avg_pool1d(x, 1 << level, axis=1)


def pooled_validity(real, level: int):
    """bool [batch, masked // 2^level]: more than half of the window is real (half is not), as the original reports."""
    return pool(real.astype(jnp.float32)[..., None], level)[..., 0] > 0.5


def interpolate(x, count_in, count_out, length: int):
    """Linear interpolation of the leading count_in entries of x [batch, token, width] to `length` places, of which the
    leading count_out are meant. Counts: ints, or int [batch].

    Source: torch.nn.functional.interpolate(mode="linear", align_corners=False).
    """
    count_in, count_out = (jnp.broadcast_to(jnp.asarray(c), x.shape[:1])[:, None] for c in (count_in, count_out))
    scale = count_in.astype(jnp.float32) / jnp.maximum(count_out, 1).astype(jnp.float32)
    place = jnp.maximum((jnp.arange(length) + 0.5) * scale - 0.5, 0.0)
    last = jnp.maximum(count_in - 1, 0)
    low = jnp.minimum(place.astype(jnp.int32), last)
    share = (place - low)[..., None].astype(x.dtype)
    return gather(x, low) * (1 - share) + gather(x, jnp.minimum(low + 1, last)) * share
