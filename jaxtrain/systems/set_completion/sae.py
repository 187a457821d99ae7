"""Sparse autoencoder: from an activation to few active features to a reconstruction, with the original's numerics.

Shapes: x [..., input_dim], features h [..., hidden_dim] with hidden_dim = int(input_dim * expansion_factor).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers

CEILING = 6.0  # upper limit of features
USAGE_DECAY = 0.99
PROBABILITY_EPS = 1e-7
NORM_EPS = 1e-12


class SparseAutoencoder(nnx.Module):
    """Autoencoder h = clip(relu(encoder(x - decoder_bias)), 0, 6), x' = h D^T + decoder_bias; D has unit columns.

    train_decoder: False gives `decoder.weight` no gradient, like the original's code. True backpropagates through the
    normalisation, which removes the gradient along each column, as the original's documentation intends. top_k: keep
    only the k largest features of a row (0: all). `decoder.bias` exists in the state dict but is unused.
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
        """Return the reconstruction and the features of x."""
        h = self.encode(x)[1]
        return self.decode(h), h

    def encode(self, x):
        """Return the features before and after the activation, both [..., hidden_dim]."""
        h_pre = self.encoder(x - self.decoder_bias[...])
        h = relu6(h_pre)
        return h_pre, keep_top(h, self.top_k) if self.top_k else h

    def decode(self, h):
        return h @ self.directions().T.astype(h.dtype) + self.decoder_bias[...]

    def directions(self):
        """Return the dictionary: unit columns [input_dim, hidden_dim]."""
        weight = self.decoder.weight[...]
        return normalize_columns(weight if self.train_decoder else jax.lax.stop_gradient(weight))

    def normalize_decoder(self) -> None:
        self.decoder.weight.set_value(normalize_columns(self.decoder.weight[...]))

    def track_usage(self, h):
        """Update `usage_ema` with the rows of h [..., hidden_dim]; return the new average [hidden_dim]."""
        usage = (h.reshape(-1, h.shape[-1]) > 0).astype(jnp.float32).mean(0)
        ema = USAGE_DECAY * self.usage_ema[...] + (1 - USAGE_DECAY) * usage
        self.usage_ema.set_value(jax.lax.stop_gradient(ema))
        return self.usage_ema[...]


def relu6(x):
    """Return min(max(x, 0), 6) with the gradient of torch's clamp: 1 for 0 < x <= 6."""
    return jnp.where(x > 0, jnp.where(x > CEILING, CEILING, x), 0.0)


def keep_top(h, k: int):
    """Zero all but the k largest values of each row; ties with the k-th are kept."""
    return jnp.where(h >= jax.lax.top_k(h, k)[0][..., -1:], h, 0.0)


def normalize_columns(weight):
    """Scale columns to unit length; a zero column stays 0. Source: torch.nn.functional.normalize(dim=0)."""
    square = jnp.square(weight).sum(0, keepdims=True)
    norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))  # the inner where keeps the gradient of a zero column finite
    return weight / jnp.maximum(jnp.where(square > 0, norm, 0.0), NORM_EPS)


def sae_loss(
    sae: SparseAutoencoder, x, l1_coefficient, usage_coefficient, target_usage: float, usage_gradient: bool = False
):
    """Return the total loss and its parts for x [row, input_dim]; updates `usage_ema` first, as the original does.

    mse: mean over all elements. l1: sum over axis 1, then mean (axis 1 is the sequence for 3-D x, as in the original).
    kl_usage: mean over features of KL(target_usage || usage_ema), in nats. It has no gradient unless usage_gradient is
    set; then its gradient is that of the batch's mean tanh(h), a differentiable substitute for usage.
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
    """Return the mean over features of KL(Bernoulli(target) || Bernoulli(usage)), in nats. usage: [hidden_dim]."""
    p = jnp.clip(usage, PROBABILITY_EPS, 1 - PROBABILITY_EPS)
    rho = target_usage
    return (rho * jnp.log(rho / p) + (1 - rho) * jnp.log((1 - rho) / (1 - p))).mean()


def dead_features(usage_ema, threshold: float = 1e-6):
    """Return bool [hidden_dim]: True for features whose average usage is below the threshold."""
    return usage_ema < threshold


def token_influence(output_weight, sae: SparseAutoencoder):
    """Return the change of each token's logit per unit of each feature, [token, hidden_dim]."""
    return output_weight @ sae.directions()


def _kaiming_uniform(key, shape):
    """Draw like torch's kaiming_uniform_ with nonlinearity relu: uniform with bound sqrt(6 / fan_in)."""
    return initializers.uniform(key, shape, math.sqrt(6 / shape[1]))


class RingBuffer(nnx.Module):
    """Ring buffer of the last `size` rows written, float32 [size, dim].

    exact_fill_bug: as in the original, a write that ends exactly at the end of the storage leaves the buffer apparently
    empty until it wraps again; False marks it full.
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
        """Return the number of readable rows, int32 scalar."""
        return jnp.where(self.full[...], self.size, self.position[...])

    def add(self, rows, valid=None) -> None:
        """Write rows [row, dim] in order; `valid` bool [row] is False for rows to skip; more axes become rows."""
        rows = jax.lax.stop_gradient(rows.reshape(-1, rows.shape[-1])).astype(jnp.float32)
        valid = jnp.ones(rows.shape[0], bool) if valid is None else valid
        size, start = self.size, self.position[...]
        number = valid.sum(dtype=jnp.int32)
        order = jnp.cumsum(valid, dtype=jnp.int32) - 1
        replaced = number >= size  # more rows than fit: keep the last `size`, from index 0 on
        slot = jnp.where(replaced, order - (number - size), (start + order) % size)
        slot = jnp.where(valid & (slot >= 0), slot, size)  # out of range: not written
        self.rows.set_value(self.rows[...].at[slot].set(rows, mode="drop"))
        end = start + number
        wrapped = end > size if self.exact_fill_bug else end >= size
        self.full.set_value(self.full[...] | replaced | wrapped)
        self.position.set_value(jnp.where(replaced, 0, end % size))

    def sample(self, key, number: int):
        """Draw [number, dim] rows uniformly with replacement from the readable rows; zeros if there are none."""
        index = jax.random.randint(key, (number,), 0, jnp.maximum(self.count(), 1))
        return self.rows[...][index]


ROWS_PER_DEAD_FEATURE = 10
CHUNK = 1024  # rows reconstructed at a time, to limit the memory of a wide dictionary


def resample(
    sae: SparseAutoencoder, rows, count, key, *, threshold: float, weight: float, bias: float, target_usage: float
):
    """Reinitialise the dead features of `sae` in place; return bool [hidden_dim], True for those replaced.

    rows: [row, input_dim], of which the first `count` are valid and the first min(count, 10 x dead) are used. Every
    dead feature draws a row with probability proportional to its reconstruction error and takes its direction. The
    caller must zero the optimizer's moments of those encoder rows.
    """
    dead = dead_features(sae.usage_ema[...], threshold)
    looked_at = jnp.arange(rows.shape[0]) < jnp.minimum(count, ROWS_PER_DEAD_FEATURE * dead.sum())
    probabilities = row_probabilities(row_errors(sae, rows), looked_at)
    index = jax.random.categorical(key, jnp.log(probabilities), shape=(sae.hidden_dim,))
    replace(sae, dead, rows[index], threshold=threshold, weight=weight, bias=bias, target_usage=target_usage)
    return dead


def row_errors(sae: SparseAutoencoder, rows):
    """Return the mean squared error of each row's reconstruction, [row]."""
    return jax.lax.map(lambda row: jnp.square(sae(row[None])[0][0] - row).mean(), rows, batch_size=CHUNK)


def row_probabilities(errors, looked_at):
    """Return errors / sum over the rows `looked_at`, both [row]; uniform if the sum is NaN or below 1e-12."""
    errors = jnp.where(looked_at, errors, 0.0)
    total = errors.sum()
    even = looked_at / jnp.maximum(looked_at.sum(), 1)
    return jnp.where(jnp.isnan(total) | (total < 1e-12), even, errors / total)


def replace(sae: SparseAutoencoder, dead, rows, *, threshold: float, weight: float, bias: float, target_usage: float):
    """Set the direction of feature i to rows[i] if dead[i]. dead: bool [hidden_dim]; rows: [hidden_dim, input_dim].

    Its bias becomes `bias`, and its usage the mean of the features in use, or target_usage if there are none.
    """
    directions = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12) * weight
    sae.encoder.weight.set_value(jnp.where(dead[:, None], directions, sae.encoder.weight[...]))
    sae.encoder.bias.set_value(jnp.where(dead, bias, sae.encoder.bias[...]))
    sae.decoder.weight.set_value(jnp.where(dead[None, :], directions.T, sae.decoder.weight[...]))
    usage = sae.usage_ema[...]
    alive = usage > threshold
    mean_alive = jnp.where(alive, usage, 0.0).sum() / jnp.maximum(alive.sum(), 1)
    sae.usage_ema.set_value(jnp.where(dead, jnp.where(alive.any(), mean_alive, target_usage), usage))


def usage_coefficient(step, base: float, warmup_steps: int, period_steps: int, floor: float):
    """Return the coefficient: linear from `floor` to `base` in warmup_steps, then a cosine down to `floor` each period.

    As in the original, base 0 does not disable it unless floor is 0 too.
    """
    warm = floor + (base - floor) * step / max(1, warmup_steps)
    phase = (step - warmup_steps) % period_steps
    wave = floor + (base - floor) * 0.5 * (1 + jnp.cos(2 * math.pi * phase / period_steps))
    return jnp.where(step < warmup_steps, warm, wave)


def l1_coefficient(step, base: float, warmup_steps: int, start: float):
    """Return the coefficient: linear from `start` to `base` in warmup_steps, then `base`."""
    return jnp.where(step < warmup_steps, start + (base - start) * step / max(1, warmup_steps), base)


def cosine_rate(step, lr: float, total_steps: int, floor_ratio: float = 0.1):
    """Return torch's CosineAnnealingLR with eta_min = floor_ratio * lr; like torch's, it rises after total_steps."""
    eta_min = floor_ratio * lr
    return eta_min + (lr - eta_min) * (1 + jnp.cos(math.pi * step / total_steps)) / 2


def original_total_steps(epochs: int, batches: int, batch_size: int, steps_before_train: int, train_steps: int) -> int:
    """Return T_max of the original's cosine. It treats steps_before_train as rows seen, not as rows in the buffer."""
    return max(0, epochs * batches - steps_before_train // batch_size) * train_steps or epochs * batches


def miracle_distance(
    mse: float,
    l0: float,
    dead_percent: float,
    targets: tuple[float, float, float] = (0.0003, 0.09, 3.5),
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> float:
    """Return the original's score: weighted log distance to the targets, each ratio floored at 0.1.

    The original passes (1 - l0) * 100 as dead_percent, which is no share of dead features; see docs/set_completion.md.
    """
    ratios = (value / target for value, target in zip((mse, l0, dead_percent), targets, strict=True))
    return math.sqrt(sum(w * math.log(max(ratio, 0.1)) ** 2 for w, ratio in zip(weights, ratios, strict=True)))
