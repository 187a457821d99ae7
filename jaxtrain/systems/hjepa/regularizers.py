"""Losses against feature collapse: VICReg, SIGReg, NT-Xent. Pure functions; each returns a dict with "loss"."""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import erfinv

Terms = dict[str, jax.Array]


def vicreg(
    a,
    b=None,
    *,
    invariance_weight: float = 25.0,
    variance_weight: float = 25.0,
    covariance_weight: float = 1.0,
    variance_threshold: float = 1.0,
    eps: float = 1e-4,
    flatten_patches: bool = True,
    keep=None,
) -> Terms:
    """Return the variance-invariance-covariance regularisation of two views [batch, ..., width].

    Without b, the halves of a's batch are the views; an odd batch raises ValueError. keep: bool [batch], pairs that
    count; None: all. One row gives a variance of NaN, as in torch. Like the original and unlike the paper, the
    covariance term is the mean of the squared off-diagonal covariances, not their sum over the width.
    Source: Bardes et al. 2022.
    """
    if b is None:
        if len(a) % 2:
            raise ValueError(f"one view of {len(a)} rows cannot be split into two halves; give an even batch")
        a, b = jnp.split(a, 2)
    a, b = (_rows(x, flatten_patches) for x in (a, b))
    keep = None if keep is None else jnp.repeat(keep, len(a) // len(keep))
    invariance = _mean_square(a - b, keep)
    variances = [_variance(x, variance_threshold, eps, keep) for x in (a, b)]
    covariances = [_covariance(x, keep) for x in (a, b)]
    variance, covariance = (sum(pair) / 2 for pair in (variances, covariances))
    return {
        "loss": invariance_weight * invariance + variance_weight * variance + covariance_weight * covariance,
        "invariance_loss": invariance,
        "variance_loss": variance,
        "covariance_loss": covariance,
        "variance_loss_a": variances[0],
        "variance_loss_b": variances[1],
        "covariance_loss_a": covariances[0],
        "covariance_loss_b": covariances[1],
    }


def _rows(x, flatten_patches: bool):
    if x.ndim < 3:
        return x
    return x.reshape(-1, x.shape[-1]) if flatten_patches else x.reshape(len(x), -1)


def _count(x, keep):
    return len(x) if keep is None else keep.sum().astype(x.dtype)


def _where(x, keep):
    return x if keep is None else jnp.where(keep[:, None], x, 0)


def _mean_square(x, keep):
    total = jnp.square(_where(x, keep)).sum()
    return total / (x.size if keep is None else jnp.maximum(_count(x, keep), 1) * x.shape[1])


def _centred(x, keep):
    count = _count(x, keep)
    mean = _where(x, keep).sum(0) / (count if keep is None else jnp.maximum(count, 1))
    return _where(x - mean, keep), count


def _variance(x, threshold: float, eps: float, keep):
    y, count = _centred(x, keep)
    if keep is None:
        variance = jnp.square(y).sum(0) / (count - 1) if count > 1 else jnp.full(x.shape[1], jnp.nan)
    else:
        variance = jnp.square(y).sum(0) / jnp.maximum(count - 1, 1)
    return jax.nn.relu(threshold - jnp.sqrt(variance + eps)).mean()


def _covariance(x, keep):
    y, count = _centred(x, keep)
    width = x.shape[1]
    matrix = y.T @ y / (max(1, count - 1) if keep is None else jnp.maximum(count - 1, 1))
    off = matrix * (1 - jnp.eye(width, dtype=matrix.dtype))
    return jnp.square(off).sum() / max(1, width * (width - 1))


def slices(key, count: int, width: int):
    """Return `count` random unit directions, float32 [count, width]."""
    rows = jax.random.normal(key, (count, width))
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def reference_points(count: int = 17):
    """Return quantiles of the standard normal at `count` probabilities from 0.01 to 0.99, float32."""
    return math.sqrt(2) * erfinv(2 * jnp.linspace(0.01, 0.99, count) - 1)


def quadrature_points(t_min: float = 0.2, t_max: float = 4.0, count: int = 32):
    return jnp.linspace(t_min, t_max, count)


def epps_pulley(
    columns,
    *,
    test_method: str = "reference_points",
    num_test_points: int = 17,
    t_min: float = 0.2,
    t_max: float = 4.0,
    num_quadrature: int = 32,
    lambda_: float = 1.0,
    eps: float = 1e-6,
    keep=None,
):
    """Return the distance from normality of each standardised row of columns [column, sample]: float [column].

    reference_points: kernel distance to quantiles of the normal. char_function: integral of the squared distance of
    characteristic functions. keep: bool [sample], samples that count.
    Source: Epps & Pulley 1983; Balestriero & LeCun 2025 (LeJEPA).
    """
    x, weight = _standardised(columns, eps, keep)
    if test_method == "reference_points":
        points = reference_points(num_test_points)
        within = jnp.exp(-jnp.square(x[:, :, None] - x[:, None, :]) / 2)
        across = jnp.exp(-jnp.square(x[:, :, None] - points) / 2)
        fixed = jnp.exp(-jnp.square(points[:, None] - points) / 2).mean()
        if weight is None:
            return within.mean((1, 2)) - 2 * across.mean((1, 2)) + fixed
        pairs = jnp.einsum("msr,s,r->m", within, weight, weight)
        return pairs - 2 * jnp.einsum("msp,s->m", across, weight) / num_test_points + fixed
    if test_method != "char_function":
        raise ValueError(f"test_method={test_method!r} is unknown; known: reference_points, char_function")
    t = quadrature_points(t_min, t_max, num_quadrature)
    angle = x[:, :, None] * t
    if weight is None:
        real, imaginary = jnp.cos(angle).mean(1), jnp.sin(angle).mean(1)
    else:
        real, imaginary = (jnp.einsum("mst,s->mt", f(angle), weight) for f in (jnp.cos, jnp.sin))
    distance = jnp.square(real - jnp.exp(-jnp.square(t) / 2)) + jnp.square(imaginary)
    density = distance * jnp.exp(-jnp.square(t) / (2 * lambda_**2))
    return jnp.trapezoid(density, dx=(t_max - t_min) / (num_quadrature - 1), axis=1)


def _standardised(x, eps: float, keep):
    """Return rows with mean 0 and unbiased standard deviation 1, and the weight of each sample (None: all equal)."""
    if keep is None:
        return (x - x.mean(1, keepdims=True)) / (x.std(1, ddof=1, keepdims=True) + eps), None
    count = jnp.maximum(keep.sum(), 1).astype(x.dtype)
    weight = keep.astype(x.dtype) / count
    y = jnp.where(keep, x - (x * weight).sum(1, keepdims=True), 0)
    square = jnp.square(y).sum(1, keepdims=True) / jnp.maximum(count - 1, 1)
    return y / (jnp.sqrt(jnp.where(square > 0, square, 1.0)) * (square > 0) + eps), weight


def sigreg_statistic(x, directions, *, keep=None, **test):
    """Return the mean Epps-Pulley statistic of x [row, width] over the directions [slice, width]; keep: bool [row]."""
    return epps_pulley(directions.astype(x.dtype) @ x.T, keep=keep, **test).mean()


def sigreg(
    a,
    b,
    directions,
    *,
    invariance_weight: float = 25.0,
    sigreg_weight: float = 25.0,
    flatten_patches: bool = True,
    keep=None,
    **test,
) -> Terms:
    """Return the invariance loss of two views plus the mean of their distances from an isotropic normal.

    directions: one array [slice, width] for both views, or a pair of them. Source: Balestriero & LeCun 2025.
    """
    a, b = (_rows(x, flatten_patches) for x in (a, b))
    keep = None if keep is None else jnp.repeat(keep, len(a) // len(keep))
    first, second = directions if isinstance(directions, (tuple, list)) else (directions, directions)
    statistics = [sigreg_statistic(x, d, keep=keep, **test) for x, d in ((a, first), (b, second))]
    invariance, statistic = _mean_square(a - b, keep), sum(statistics) / 2
    return {
        "loss": invariance_weight * invariance + sigreg_weight * statistic,
        "invariance_loss": invariance,
        "sigreg_loss": statistic,
        "sigreg_loss_a": statistics[0],
        "sigreg_loss_b": statistics[1],
    }


def ntxent(a, b, *, temperature: float = 0.1, use_cosine_similarity: bool = True, keep=None) -> Terms:
    """Return the normalised temperature-scaled cross-entropy in nats: rows i of a and b attract, all others repel.

    keep: bool [row]; other rows are neither anchors nor negatives. `negative_similarity` is -inf, as the original logs.
    Source: Chen et al. 2020 (SimCLR).
    """
    a, b = (_rows(x, True) for x in (a, b))
    if keep is None:
        keep = jnp.ones(len(a), bool)
    keep = jnp.repeat(keep, len(a) // len(keep))
    if use_cosine_similarity:
        a, b = normalize(a), normalize(b)
    other = ~jnp.eye(len(a), dtype=bool) & keep
    positive = (a * b).sum(-1) / temperature
    losses, hits = [], []
    for x, y in ((a, b), (b, a)):
        negatives = [jnp.where(other, x @ z.T / temperature, -jnp.inf) for z in (x, y)]
        logits = jnp.concatenate([positive[:, None], *negatives], axis=1)
        losses.append(jax.nn.logsumexp(logits, axis=1) - positive)
        hits.append(positive >= logits.max(1))
    count = jnp.maximum(keep.sum(), 1)
    return {
        "loss": sum(jnp.where(keep, loss, 0).sum() for loss in losses) / (2 * count),
        "accuracy": sum(jnp.where(keep, hit, False).sum() for hit in hits) / (2 * count),
        "positive_similarity": jnp.where(keep, positive, 0).sum() / count,
        "negative_similarity": jnp.full((), -jnp.inf),
    }


def normalize(x, eps: float = 1e-8):
    """Return x / max(||x||, eps) over the last axis; a zero vector's norm has gradient 0. Source: torch normalize."""
    square = jnp.square(x).sum(-1, keepdims=True)
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    return x / jnp.maximum(norm, eps)
