"""Lists of masked patches: boolean masks as index lists, and pooling along a list.

All lists of a batch have one static length. `present` marks, per sample, the leading entries that take part: all
entries if every mask has the same count, the sample's own count for ragged masks, the largest count of the batch under
`compat: original` (where padding entries point at patch 0 and act as genuine tokens).
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxtrain import nn
from jaxtrain.nn import avg_pool1d


class Masked(NamedTuple):
    """Masked patches of a batch as lists.

    indices: int [batch, masked], patches in ascending order, then 0. real: bool [batch, masked], False for padding.
    count: number of entries that take part: an int for all samples, or int [batch].
    """

    indices: jnp.ndarray
    real: jnp.ndarray
    count: jnp.ndarray | int

    def present(self, level: int = 0):
        """Return which pooled entries have a whole window, bool [(batch,) masked // 2^level]; None for all."""
        length = self.indices.shape[1] >> level
        if isinstance(self.count, int):
            return None if self.count >> level >= length else jnp.arange(length) < (self.count >> level)
        return jnp.arange(length) < (self.count >> level)[:, None]


def masked_patches(mask, length: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Return the first `length` True positions of mask [batch, patch], ascending, 0-padded, and which are real."""
    patches = mask.shape[1]
    ordered = jnp.sort(jnp.where(mask, jnp.arange(patches), patches), axis=1)[:, :length]
    real = ordered < patches
    return jnp.where(real, ordered, 0), real


def fixed_count(mask, count: int) -> Masked:
    """List the patches of masks that all have `count` of them."""
    indices, real = masked_patches(mask, count)
    return Masked(indices, real, count)


def ragged(mask, length: int) -> Masked:
    """List the patches of masks with any counts up to `length`; attention and loss ignore the padding."""
    indices, real = masked_patches(mask, length)
    return Masked(indices, real, real.sum(1))


def padded_to_largest(mask, length: int, valid=None) -> Masked:
    """List patches as the original does: padded to the batch's largest count, with the padding taking part.

    valid: bool [batch], rows that are considered for the largest count.
    """
    indices, real = masked_patches(mask, length)
    counts = real.sum(1) if valid is None else jnp.where(valid, real.sum(1), 0)
    return Masked(indices, real, jnp.broadcast_to(counts.max(), counts.shape))


def gather(tokens, indices):
    """Return tokens [batch, patch, width] at indices [batch, masked]."""
    return nn.tokens(tokens, indices)


def pool(x, level: int):
    """Return the mean of every 2^level neighbouring entries of [batch, token, width]; the remainder is dropped."""
    return x if level == 0 else avg_pool1d(x, 1 << level, axis=1)


def pooled_validity(real, level: int):
    """Return True where more than half of a window is real, as the original reports: bool
    [batch, masked // 2^level]."""
    return pool(real.astype(jnp.float32)[..., None], level)[..., 0] > 0.5


def interpolate(x, count_in, count_out, length: int):
    """Interpolate the leading count_in entries of x [batch, token, width] linearly to `length` places.

    Only the leading count_out places are meaningful. Counts: ints, or int [batch].
    Source: torch.nn.functional.interpolate(mode="linear", align_corners=False).
    """
    count_in, count_out = (jnp.broadcast_to(jnp.asarray(c), x.shape[:1])[:, None] for c in (count_in, count_out))
    scale = count_in.astype(jnp.float32) / jnp.maximum(count_out, 1).astype(jnp.float32)
    position = jnp.maximum((jnp.arange(length) + 0.5) * scale - 0.5, 0.0)
    last = jnp.maximum(count_in - 1, 0)
    low = jnp.minimum(position.astype(jnp.int32), last)
    share = (position - low)[..., None].astype(x.dtype)
    return gather(x, low) * (1 - share) + gather(x, jnp.minimum(low + 1, last)) * share
