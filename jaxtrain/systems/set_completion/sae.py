"""The sparse autoencoder: activation -> few active features -> reconstruction, with the original's numerics.

Shapes: x [..., input_dim], features h [..., hidden_dim] with hidden_dim = int(input_dim * expansion_factor).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers

CEILING = 6.0  # features are cut off above it
USAGE_DECAY = 0.99
PROBABILITY_EPS = 1e-7
NORM_EPS = 1e-12


class SparseAutoencoder(nnx.Module):
    """h = clip(relu(encoder(x - decoder_bias)), 0, 6); x' = h D^T + decoder_bias with D's columns of unit length.

    train_decoder: False gives `decoder.weight` no gradient at all, as the original's code does; True lets gradients
    through the normalisation, which removes their part along each column, as the original's text intends.
    top_k: keep only the k largest features of a row (0: all). `decoder.bias` exists in the state dict and is unused.
    """

    def __init__(
        self,
        input_dim: int,
        expansion_factor: float = 8,
        train_decoder: bool = False,
        top_k: int = 0,
        *,
        rngs: nnx.Rngs,
    ):
        hidden_dim = int(input_dim * expansion_factor)
        self.decoder_bias = nnx.Param(jnp.zeros(input_dim))
        self.usage_ema = nn.Buffer(jnp.zeros(hidden_dim))
        self.encoder = nn.Linear(input_dim, hidden_dim, rngs=rngs)
        self.decoder = nn.Linear(hidden_dim, input_dim, rngs=rngs)
        self.encoder.weight.set_value(_kaiming_uniform(rngs.params(), (hidden_dim, input_dim)))
        self.encoder.bias.set_value(jnp.zeros(hidden_dim))
        self.decoder.weight.set_value(normalize_columns(_kaiming_uniform(rngs.params(), (input_dim, hidden_dim))))
        self.train_decoder = train_decoder
        self.top_k = top_k

    @property
    def hidden_dim(self) -> int:
        return self.usage_ema.shape[0]

    def __call__(self, x):
        """Reconstruction and features of x."""
        h = self.encode(x)[1]
        return self.decode(h), h

    def encode(self, x):
        """Features before and after the activation, both [..., hidden_dim]."""
        h_pre = self.encoder(x - self.decoder_bias[...])
        h = relu6(h_pre)
        return h_pre, keep_top(h, self.top_k) if self.top_k else h

    def decode(self, h):
        return h @ self.directions().T.astype(h.dtype) + self.decoder_bias[...]

    def directions(self):
        """The dictionary: unit columns [input_dim, hidden_dim]."""
        weight = self.decoder.weight[...]
        return normalize_columns(weight if self.train_decoder else jax.lax.stop_gradient(weight))

    def normalize_decoder(self) -> None:
        self.decoder.weight.set_value(normalize_columns(self.decoder.weight[...]))

    def track_usage(self, h):
        """Move `usage_ema` by the rows of h [..., hidden_dim]; the new average [hidden_dim]."""
        usage = (h.reshape(-1, h.shape[-1]) > 0).astype(jnp.float32).mean(0)
        ema = USAGE_DECAY * self.usage_ema[...] + (1 - USAGE_DECAY) * usage
        self.usage_ema.set_value(jax.lax.stop_gradient(ema))
        return self.usage_ema[...]


def relu6(x):
    """min(max(x, 0), 6) with torch's clamp gradient: 1 for 0 < x <= 6."""
    return jnp.where(x > 0, jnp.where(x > CEILING, CEILING, x), 0.0)


def keep_top(h, k: int):
    """Zero all but the k largest of each row; ties with the k-th stay."""
    return jnp.where(h >= jax.lax.top_k(h, k)[0][..., -1:], h, 0.0)


def normalize_columns(weight):
    """Columns of unit length; one of length 0 stays 0. Source: torch.nn.functional.normalize(dim=0)."""
    square = jnp.square(weight).sum(0, keepdims=True)
    norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))  # the inner where keeps the gradient of a zero column finite
    return weight / jnp.maximum(jnp.where(square > 0, norm, 0.0), NORM_EPS)


def sae_loss(
    sae: SparseAutoencoder, x, l1_coefficient, usage_coefficient, target_usage: float, usage_gradient: bool = False
):
    """Total loss and its parts of one batch x [row, input_dim]; moves `usage_ema` first, as the original does.

    mse: mean over all elements. l1: sum over axis 1, then mean (over the SEQUENCE axis for 3-D x: the original's
    rule). kl_usage: mean over features of KL(target_usage || usage_ema), in nats; without gradient unless
    usage_gradient, where the batch's own usage stands in for the average as tanh(h), which has a slope.
    """
    reconstruction, h = sae(x)
    mse = jnp.square(reconstruction - x).mean()
    l1 = jnp.abs(h).sum(1).mean()
    usage = sae.track_usage(h)
    if usage_gradient:
        smooth = jnp.tanh(h).reshape(-1, h.shape[-1]).mean(0)
        usage = usage + smooth - jax.lax.stop_gradient(smooth)
    kl = usage_divergence(usage, target_usage)
    total = mse + l1_coefficient * l1 + usage_coefficient * kl
    return total, {"mse": mse, "l1": l1, "kl_usage": kl}


def usage_divergence(usage, target_usage: float):
    """Mean over features of KL(Bernoulli(target) || Bernoulli(usage)), in nats. usage: [hidden_dim]."""
    p = jnp.clip(usage, PROBABILITY_EPS, 1 - PROBABILITY_EPS)
    rho = target_usage
    return (rho * jnp.log(rho / p) + (1 - rho) * jnp.log((1 - rho) / (1 - p))).mean()


def dead_features(usage_ema, threshold: float = 1e-6):
    """bool [hidden_dim]: features whose average usage is below the threshold."""
    return usage_ema < threshold


def token_influence(output_weight, sae: SparseAutoencoder):
    """How much one unit of each feature adds to each token's logit: [token, hidden_dim]."""
    return output_weight @ sae.directions()


def _kaiming_uniform(key, shape):
    """Bound sqrt(6 / fan_in): torch kaiming_uniform_ with nonlinearity relu."""
    return initializers.uniform(key, shape, math.sqrt(6 / shape[1]))
