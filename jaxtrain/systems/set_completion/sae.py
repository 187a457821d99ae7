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


class RingBuffer(nnx.Module):
    """The last `size` rows written, [size, dim] float32, and where the next one goes.

    exact_fill_bug: the original's rule, by which writes that end exactly at the end leave the buffer looking empty
    until it wraps again; False marks it full.
    """

    def __init__(self, size: int, dim: int, exact_fill_bug: bool = False):
        self.rows = nn.Carry(jnp.zeros((size, dim)), stays_finite=True)  # add() is given finite rows only
        self.position = nn.Carry(jnp.zeros((), jnp.int32))
        self.full = nn.Carry(jnp.zeros((), bool))
        self.exact_fill_bug = exact_fill_bug

    @property
    def size(self) -> int:
        return self.rows.shape[0]

    def count(self):
        """int32 scalar: rows that can be read."""
        return jnp.where(self.full[...], self.size, self.position[...])

    def add(self, rows, valid=None) -> None:
        """Write rows [row, dim] (further axes are flattened to rows) where `valid` bool [row] is True, in order."""
        rows = jax.lax.stop_gradient(rows.reshape(-1, rows.shape[-1])).astype(jnp.float32)
        valid = jnp.ones(rows.shape[0], bool) if valid is None else valid
        size, start = self.size, self.position[...]
        number = valid.sum(dtype=jnp.int32)
        order = jnp.cumsum(valid, dtype=jnp.int32) - 1
        replaced = number >= size  # more than fits: only the last `size` stay, from the beginning of the storage
        place = jnp.where(replaced, order - (number - size), (start + order) % size)
        place = jnp.where(valid & (place >= 0), place, size)  # out of range: not written
        self.rows.set_value(self.rows[...].at[place].set(rows, mode="drop"))
        end = start + number
        wrapped = end > size if self.exact_fill_bug else end >= size
        self.full.set_value(self.full[...] | replaced | wrapped)
        self.position.set_value(jnp.where(replaced, 0, end % size))

    def sample(self, key, number: int):
        """[number, dim]: rows drawn evenly, with repetition, from those that can be read; zeros if none."""
        index = jax.random.randint(key, (number,), 0, jnp.maximum(self.count(), 1))
        return self.rows[...][index]


ROWS_PER_DEAD_FEATURE = 10
CHUNK = 1024  # rows reconstructed at a time: bounds the memory of a wide dictionary


def resample(
    sae: SparseAutoencoder, rows, count, key, *, threshold: float, weight: float, bias: float, target_usage: float
):
    """Replace the dead features of `sae` in place; bool [hidden_dim] of those replaced.

    rows: [row, input_dim], of which the first `count` are there; the first min(count, 10 x dead) of them are looked at.
    Every dead feature draws a row with probability proportional to its error and takes its direction.
    The caller zeroes the optimizer's moments of those encoder rows.
    """
    dead = dead_features(sae.usage_ema[...], threshold)
    looked_at = jnp.arange(rows.shape[0]) < jnp.minimum(count, ROWS_PER_DEAD_FEATURE * dead.sum())
    probabilities = row_probabilities(row_errors(sae, rows), looked_at)
    index = jax.random.categorical(key, jnp.log(probabilities), shape=(sae.hidden_dim,))
    replace(sae, dead, rows[index], threshold=threshold, weight=weight, bias=bias, target_usage=target_usage)
    return dead


def row_errors(sae: SparseAutoencoder, rows):
    """Mean squared error of each row's reconstruction, [row]."""
    return jax.lax.map(lambda row: jnp.square(sae(row[None])[0][0] - row).mean(), rows, batch_size=CHUNK)


def row_probabilities(errors, looked_at):
    """errors / sum over the rows looked at; even where that is no distribution. errors, looked_at: [row]."""
    errors = jnp.where(looked_at, errors, 0.0)
    total = errors.sum()
    even = looked_at / jnp.maximum(looked_at.sum(), 1)
    return jnp.where(jnp.isnan(total) | (total < 1e-12), even, errors / total)


def replace(sae: SparseAutoencoder, dead, rows, *, threshold: float, weight: float, bias: float, target_usage: float):
    """Point feature i, where dead[i], at rows[i]. dead: bool [hidden_dim]; rows: [hidden_dim, input_dim]."""
    directions = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12) * weight
    sae.encoder.weight.set_value(jnp.where(dead[:, None], directions, sae.encoder.weight[...]))
    sae.encoder.bias.set_value(jnp.where(dead, bias, sae.encoder.bias[...]))
    sae.decoder.weight.set_value(jnp.where(dead[None, :], directions.T, sae.decoder.weight[...]))
    usage = sae.usage_ema[...]
    alive = usage > threshold
    mean_alive = jnp.where(alive, usage, 0.0).sum() / jnp.maximum(alive.sum(), 1)
    sae.usage_ema.set_value(jnp.where(dead, jnp.where(alive.any(), mean_alive, target_usage), usage))


def usage_coefficient(step, base: float, warmup_steps: int, period_steps: int, floor: float):
    """From `floor` straight up to `base` in warmup_steps, then a cosine that dips to `floor` once per period.

    base 0 does not switch it off unless floor is 0 too: the original's rule.
    """
    warm = floor + (base - floor) * step / max(1, warmup_steps)
    phase = (step - warmup_steps) % period_steps
    wave = floor + (base - floor) * 0.5 * (1 + jnp.cos(2 * math.pi * phase / period_steps))
    return jnp.where(step < warmup_steps, warm, wave)


def l1_coefficient(step, base: float, warmup_steps: int, start: float):
    """From `start` straight to `base` in warmup_steps, then `base`."""
    return jnp.where(step < warmup_steps, start + (base - start) * step / max(1, warmup_steps), base)


def cosine_rate(step, lr: float, total_steps: int, floor_ratio: float = 0.1):
    """torch CosineAnnealingLR with eta_min = floor_ratio * lr; it rises again after total_steps, as torch's does."""
    eta_min = floor_ratio * lr
    return eta_min + (lr - eta_min) * (1 + jnp.cos(math.pi * step / total_steps)) / 2


def original_total_steps(epochs: int, batches: int, batch_size: int, steps_before_train: int, train_steps: int) -> int:
    """T_max of the original's cosine. It ignores that steps_before_train counts rows of a buffer that may empty."""
    return max(0, epochs * batches - steps_before_train // batch_size) * train_steps or epochs * batches


def miracle_distance(mse: float, l0: float, dead_percent: float) -> float:
    """The original's score: log distance to mse 0.0003, l0 0.09 and 3.5 % dead, each ratio floored at 0.1.

    The original passes (1 - l0) * 100 as dead_percent, which is no death rate; see docs/set_completion.md.
    """
    targets = ((mse, 0.0003), (l0, 0.09), (dead_percent, 3.5))
    return math.sqrt(sum(math.log(max(value / target, 0.1)) ** 2 for value, target in targets))
