"""Convolutions on [batch, channel, *space] with torch's weight layouts."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import initializers
from jaxtrain.nn.correlation import correlate
from jaxtrain.nn.scopes import named


class _Conv(nnx.Module):
    """Cross-correlation. weight: [out, in / groups, *kernel]; bias: [out]. Source: torch.nn.Conv1d/2d/3d."""

    rank: int

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True, *, rngs
    ):
        kernel = _tuple(kernel_size, self.rank)
        shape = (out_channels, in_channels // groups, *kernel)
        self.weight = nnx.Param(initializers.linear_weight(rngs.params(), shape))
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self.bias = nnx.Param(initializers.uniform(rngs.params(), (out_channels,), bound)) if bias else None
        self.stride = _tuple(stride, self.rank)
        self.padding = _tuple(padding, self.rank)
        self.dilation = _tuple(dilation, self.rank)
        self.groups = groups

    @named
    def __call__(self, x, rngs=None):
        weight = self.weight[...]
        pads = [(p, p) for p in self.padding]
        y = correlate(x.astype(weight.dtype), weight, self.stride, pads, dilation=self.dilation, groups=self.groups)
        return _add_bias(y, self.bias)


class Conv1d(_Conv):
    rank = 1


class Conv2d(_Conv):
    rank = 2


class Conv3d(_Conv):
    rank = 3


class _ConvTranspose(nnx.Module):
    """Transposed convolution. weight: [in, out, *kernel]; bias: [out]. Source: torch.nn.ConvTranspose1d/2d."""

    rank: int

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, output_padding=0, bias=True, *, rngs
    ):
        kernel = _tuple(kernel_size, self.rank)
        shape = (in_channels, out_channels, *kernel)
        self.weight = nnx.Param(initializers.linear_weight(rngs.params(), shape))
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self.bias = nnx.Param(initializers.uniform(rngs.params(), (out_channels,), bound)) if bias else None
        self.kernel = kernel
        self.stride = _tuple(stride, self.rank)
        self.padding = _tuple(padding, self.rank)
        self.output_padding = _tuple(output_padding, self.rank)

    @named
    def __call__(self, x, rngs=None):
        weight = self.weight[...]
        pads = [
            (k - 1 - p, k - 1 - p + extra)
            for k, p, extra in zip(self.kernel, self.padding, self.output_padding, strict=True)
        ]
        flipped = jnp.flip(weight, range(2, weight.ndim)).swapaxes(0, 1)
        y = correlate(x.astype(weight.dtype), flipped, (1,) * self.rank, pads, gaps=self.stride)
        return _add_bias(y, self.bias)


class ConvTranspose1d(_ConvTranspose):
    rank = 1


class ConvTranspose2d(_ConvTranspose):
    rank = 2


def avg_pool1d(x, window: int, axis: int = -1):
    """Average non-overlapping windows along `axis`; drop the remainder. Source: torch avg_pool1d(k, stride=k)."""
    axis %= x.ndim
    length = x.shape[axis] // window * window
    x = jax.lax.slice_in_dim(x, 0, length, axis=axis)
    return x.reshape(*x.shape[:axis], length // window, window, *x.shape[axis + 1 :]).mean(axis + 1)


def _tuple(value, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _add_bias(y, bias):
    return y if bias is None else y + bias[...].reshape(1, -1, *(1,) * (y.ndim - 2)).astype(y.dtype)
