"""Metrics of voxel prediction: per volume over voxels, as the original reports it, and per voxel over time."""

import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.fmri_autoencoder.losses import wide
from jaxtrain.task import Statistics

EPSILON = 1e-8


def compute_correlation_metric(prediction, target, dim: int = 1):
    """Return the Pearson correlation along `dim`; 0 for a constant slice. dim=1: over voxels, one value per volume."""
    x, y = (_centred(z, dim) for z in (prediction, target))
    norms = jnp.sqrt(jnp.square(x).sum(dim)) * jnp.sqrt(jnp.square(y).sum(dim))
    return (x * y).sum(dim) / (norms + EPSILON)


def compute_r2_score(prediction, target, dim: int = 1):
    """Return 1 - residual / total sum of squares along `dim`."""
    prediction, target = (wide(jnp.asarray(z)) for z in (prediction, target))
    residual = jnp.square(target - prediction).sum(dim)
    return 1 - residual / (jnp.square(_centred(target, dim)).sum(dim) + EPSILON)


def _centred(x, dim: int):
    x = wide(jnp.asarray(x))
    return x - x.mean(dim, keepdims=True)


def voxel_sums(prediction, target, valid) -> dict:
    """Return additive statistics of [batch, voxel] for `voxel_correlation`, each [voxel] but the scalar `count`."""
    mask = valid[:, None]
    x, y = (jnp.where(mask, jnp.asarray(z).astype(jnp.float32), 0) for z in (prediction, target))
    sums = {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
    return {name: value.sum(0) for name, value in sums.items()} | {"count": valid.sum().astype(jnp.float32)}


def voxel_correlation(sums) -> np.ndarray:
    """Return each voxel's Pearson correlation over all volumes, from summed `voxel_sums`; 0 for a constant voxel."""
    n = max(float(sums["count"]), 1.0)
    x, y, xx, yy, xy = (np.asarray(sums[name], np.float64) for name in ("x", "y", "xx", "yy", "xy"))
    covariance = xy - x * y / n
    spread = np.sqrt(np.maximum(xx - x * x / n, 0) * np.maximum(yy - y * y / n, 0))
    return np.where(spread > EPSILON * n, covariance / np.maximum(spread, EPSILON), 0.0)


def eval_statistics(outputs, batch, config) -> Statistics:
    prediction, target = (z.astype(jnp.float32) for z in (outputs["predicted_fmri"], batch["fmri"]))
    valid = batch["valid"]
    over_valid = lambda values: jnp.where(valid, values, 0).sum()
    rows = {
        "fmri_correlation": compute_correlation_metric(prediction, target),
        "fmri_r2": compute_r2_score(prediction, target),
        "fmri_mse": jnp.square(prediction - target).mean(-1),
    }
    return Statistics(sums={name: over_valid(values) for name, values in rows.items()} | _prefixed(prediction, batch))


def _prefixed(prediction, batch) -> dict:
    return {f"voxel_{name}": value for name, value in voxel_sums(prediction, batch["fmri"], batch["valid"]).items()}


def compute(sums, rows, config) -> dict[str, float]:
    """Return the metrics of a split from its sums.

    voxel_correlation: Pearson over time, averaged over voxels; `_p90`: its 90th percentile. The mean predictor's are 0.
    fmri_correlation, fmri_r2: over voxels, averaged over volumes, as the original reports them.
    fmri_mse_of_mean: error of predicting every voxel by its mean, for comparison with the model's fmri_mse.
    """
    voxels = {name.removeprefix("voxel_"): value for name, value in sums.items() if name.startswith("voxel_")}
    count = max(float(voxels["count"]), 1.0)
    correlation = voxel_correlation(voxels)
    variance = np.asarray(voxels["yy"], np.float64) / count - np.square(np.asarray(voxels["y"], np.float64) / count)
    return {
        "voxel_correlation": float(correlation.mean()),
        "voxel_correlation_p90": float(np.percentile(correlation, 90)),
        **{name: float(sums[name]) / count for name in ("fmri_correlation", "fmri_r2", "fmri_mse")},
        "fmri_mse_of_mean": float(variance.mean()),
    }
