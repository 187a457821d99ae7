"""Projections of the hierarchy levels, and the feature pyramid over masked tokens."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.nn import BatchNorm, LayerNorm, Linear, Sequential
from jaxtrain.systems.hjepa.tokens import Masked, interpolate, pool


class MaskedBatchNorm(BatchNorm):
    """BatchNorm over rows [row, width]; only the rows in `keep` (bool [row]) enter the statistics."""

    def __call__(self, x, rngs=None, keep=None):
        if rngs is None or keep is None:
            return super().__call__(x, rngs)
        y = x.astype(jnp.float32)
        weight = keep.astype(jnp.float32)[:, None]
        count = jnp.maximum(weight.sum(), 1)
        mean = (y * weight).sum(0) / count
        var = (jnp.square(y - mean) * weight).sum(0) / count
        self._move(mean, var, count, keep.any())
        y = (y - mean) * jax.lax.rsqrt(var + self.eps) * self.weight[...] + self.bias[...]
        return y.astype(x.dtype)

    def _move(self, mean, var, count, any_row):
        mean, var = jax.lax.stop_gradient((mean, var * count / jnp.maximum(count - 1, 1)))
        rate = jnp.where(any_row, self.momentum, 0.0)
        self.running_mean.set_value((1 - rate) * self.running_mean[...] + rate * mean)
        self.running_var.set_value((1 - rate) * self.running_var[...] + rate * var)
        self.num_batches_tracked.set_value(self.num_batches_tracked[...] + any_row.astype(jnp.int32))


class TokenBatchNorm(nnx.Module):
    """BatchNorm of [batch, token, width] or [row, width] that treats every token as a row; its key is `bn`."""

    def __init__(self, width: int):
        self.bn = MaskedBatchNorm(width)

    def __call__(self, x, rngs=None, keep=None):
        rows = x.reshape(-1, x.shape[-1])
        keep = None if keep is None else jnp.broadcast_to(keep, x.shape[:-1]).reshape(-1)
        return self.bn(rows, rngs, keep).reshape(x.shape)


class Projection(Sequential):
    """Linear (key 0), then LayerNorm or BatchNorm (key 1) or nothing."""

    def __init__(self, width_in: int, width_out: int, norm: str, *, rngs: nnx.Rngs):
        layers: list = [Linear(width_in, width_out, rngs=rngs)]
        if norm == "layernorm":
            layers.append(LayerNorm(width_out))
        elif norm == "batchnorm":
            layers.append(TokenBatchNorm(width_out))
        elif norm != "none":
            raise UserError(f"model.projection_norm: {norm!r} is unknown; known: layernorm, batchnorm, none")
        super().__init__(*layers)

    def __call__(self, x, rngs=None, keep=None):
        """keep: bool, broadcastable to x's leading axes; only these rows enter batch statistics."""
        x = self[0](x)
        for norm in list(self)[1:]:
            x = norm(x, rngs, keep) if isinstance(norm, TokenBatchNorm) else norm(x)
        return x


class FeaturePyramid:
    """Forward pass of the feature pyramid. The layers belong to the model, under the original's keys."""

    def __init__(self, lateral, top_down, fusion, levels: int):
        self.lateral, self.top_down, self.fusion, self.levels = lateral, top_down, fusion, levels

    def __call__(self, x, count) -> list:
        """Pool and project x for each level, then fuse the levels from the coarsest down.

        x: [batch, token, width]; the leading `count` tokens take part.
        Returns one [batch, token // 2^level, feature] per level.
        """
        pyramid = [_normed(self.lateral[level], pool(x, level)) for level in range(self.levels)]
        merged = [pyramid[-1]]
        for level in range(self.levels - 2, -1, -1):
            fine, coarse = pyramid[level], merged[0]
            if fine.shape[1] != coarse.shape[1]:
                coarse = interpolate(coarse, count >> (level + 1), count >> level, fine.shape[1])
            coarse = _normed(self.top_down[level], coarse)
            if self.fusion is None:
                fine = fine + coarse
            else:
                fine = jax.nn.relu(_normed(self.fusion[level], jnp.concatenate([fine, coarse], axis=-1)))
            merged.insert(0, fine)
        return merged


def _normed(layers, x):
    return layers[1](layers[0](x))


def keep_of(masked: Masked, level: int, valid):
    """Return which pooled entries enter batch statistics: bool broadcastable to [batch, token], or None for all."""
    present = masked.present(level)
    if valid is None:
        return present
    return valid[:, None] if present is None else present & valid[:, None]
