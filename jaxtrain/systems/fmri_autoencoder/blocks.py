"""Building blocks of both generations: overridable widths, and stacks that keep padded rows out of BatchNorm."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers

AUDIO_CODEBOOKS = 8  # rows of an EnCodec window, however many the codec returns
LARGEST_CODE = 1023


class Widths:
    """Overrides of the widths that the originals hard-code: `Widths({16384: 40})(16384)` is 40.

    Applied to every size of a Linear or BatchNorm; a size that is not a key stays as it is.
    """

    def __init__(self, overrides: Mapping[int, int] | None = None):
        self._overrides = {int(old): int(new) for old, new in (overrides or {}).items()}

    def __call__(self, size: int) -> int:
        return self._overrides.get(size, size)


class HeLinear(nn.Linear):
    """Linear whose weight starts normal with std sqrt(2 / out_features) and whose bias starts at 0.

    Source: torch.nn.init.kaiming_normal_(mode="fan_out", nonlinearity="relu").
    """

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        std = math.sqrt(2 / out_features)
        self.weight = nnx.Param(initializers.normal(rngs.params(), (out_features, in_features), std))
        self.bias = nnx.Param(jnp.zeros(out_features))


def normalize(norm: nn.BatchNorm, layer, x, rngs=None, valid=None):
    """Apply BatchNorm to x [batch, channel, *space], the output of `layer`.

    In training BatchNorm cancels the layer's bias, so the bias gets gradient 0: computed, the gradient would be
    rounding noise, which Adam turns into steps of the size of the learning rate.
    """
    if rngs is not None:
        bias = layer.bias[...].reshape(1, -1, *(1,) * (x.ndim - 2))
        x = x + (jax.lax.stop_gradient(bias) - bias).astype(x.dtype)  # adds 0, and cancels the bias's gradient
    return norm(x, rngs=rngs, valid=valid)


class Stack(nn.Sequential):
    """Sequential that tells its BatchNorms which rows of the batch are real."""

    def __call__(self, x, rngs=None, valid=None):
        layer = None
        for module in self:
            if isinstance(module, nn.BatchNorm):
                x = normalize(module, layer, x, rngs, valid)
            else:
                x = module(x, rngs=rngs)
            layer = module
        return x


def block(inputs: int, outputs: int, dropout: float, *, rngs, linear=nn.Linear, groups: int = 1) -> list:
    """Return Linear, BatchNorm, ReLU, Dropout: four entries of a Sequential."""
    return [
        linear(inputs, outputs, rngs=rngs),
        nn.BatchNorm(outputs, groups=groups),
        nn.Activation(jax.nn.relu),
        nn.Dropout(dropout),
    ]


class DenseEncoder(nnx.Module):
    """Linear and BatchNorm by turns: fc1, bn1, fc2, bn2, ... in torch's flat naming. [batch, inputs] -> [batch, out].

    sizes: output sizes of the layers. dropouts: one rate per layer. relu_first: True if ReLU comes before the dropout.
    """

    def __init__(self, inputs: int, sizes, dropouts, *, rngs: nnx.Rngs, groups: int = 1, relu_first: bool = True):
        for number, size in enumerate(sizes, 1):
            setattr(self, f"fc{number}", nn.Linear(inputs, size, rngs=rngs))
            setattr(self, f"bn{number}", nn.BatchNorm(size, groups=groups))
            inputs = size
        self.dropouts = tuple(dropouts)
        self.relu_first = relu_first

    def __call__(self, x, rngs=None, valid=None):
        for number, _ in enumerate(self.dropouts, 1):
            x = self.layer(number, x, rngs, valid)
        return x

    def layer(self, number: int, x, rngs=None, valid=None):
        """Apply layer `number`, counted from 1: Linear, BatchNorm, then ReLU and Dropout in either order."""
        linear = getattr(self, f"fc{number}")
        x = normalize(getattr(self, f"bn{number}"), linear, linear(x), rngs, valid)
        drop = nn.Dropout(self.dropouts[number - 1])
        return drop(jax.nn.relu(x), rngs) if self.relu_first else jax.nn.relu(drop(x, rngs))
