"""Metrics of pre-training: cheap collapse indicators inside the step, exact ones after an evaluation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.task import Statistics

JUDGED_ROWS = 5000  # kNN and the probe use at most this many validation samples


class CollapseWarning(UserWarning):
    """Features of different images have become the same, or span few directions."""


def in_step(context, target, valid) -> dict[str, jax.Array]:
    """Return collapse indicators of a training batch, computed over the whole batch on all devices.

    context, target: [batch, token, width]. *_std: standard deviation over images of the pooled features, averaged over
    dimensions; it approaches 0 when all images get the same features. *_norm: mean length of a token.
    target_directions: the participation ratio (sum of eigenvalues)^2 / sum of their squares of the pooled targets'
    covariance, at most the batch size.
    """
    weight = valid.astype(jnp.float32) / jnp.maximum(valid.sum(), 1)
    values = {}
    for name, tokens in (("context", context), ("target", target)):
        tokens = jax.lax.stop_gradient(tokens).astype(jnp.float32)
        rows = tokens.mean(1)
        centred = (rows - weight @ rows) * jnp.sqrt(weight)[:, None]
        values[f"{name}_std"] = jnp.sqrt(jnp.square(centred).sum(0)).mean()
        values[f"{name}_norm"] = (weight * jnp.linalg.norm(tokens, axis=-1).mean(1)).sum()
        if name == "target":
            gram = centred @ centred.T
            values["target_directions"] = jnp.square(jnp.trace(gram)) / jnp.maximum(jnp.square(gram).sum(), 1e-30)
    return values


def eval_statistics(outputs, batch, config) -> Statistics:
    label = batch["label"] if "label" in batch else jnp.full(batch["valid"].shape, -1)
    return Statistics(rows={"features": outputs["features"], "label": label})


def compute(sums, rows, config) -> dict[str, float]:
    """Return rank and spread of the validation features, and kNN and probe accuracy in percent."""
    return after_evaluation(rows["features"], rows["label"], config.probe)


def after_evaluation(features: np.ndarray, labels: np.ndarray, probe) -> dict[str, float]:
    """Return metrics of validation features [sample, width]: rank, spread, and accuracies if labels are known (>= 0).

    probe: a ProbeConfig. `collapsed` is 1 if the effective rank or the spread is below its limit; a CollapseWarning
    says so.
    """
    features = np.asarray(features, np.float64)
    if len(features) < 2 or not np.isfinite(features).all():
        return {"collapsed": float(not np.isfinite(features).all())}
    spectrum = rank(features)
    deviation = float(features.std(0).mean())
    collapsed = spectrum["rank_ratio"] < probe.collapse_rank_ratio or deviation < probe.collapse_std
    if collapsed:
        warnings.warn(
            f"features have collapsed or are about to: effective rank {spectrum['effective_rank']:.2f} of "
            f"{spectrum['feature_dim']} (limit {probe.collapse_rank_ratio:g} of it), standard deviation over images "
            f"{deviation:.2g} (limit {probe.collapse_std:g}). Use an EMA target (model.use_target_encoder), a "
            "regulariser (loss.type: hjepa_sigreg or combined), or a lower optim.lr",
            CollapseWarning,
            stacklevel=2,
        )
    values = {
        "effective_rank": spectrum["effective_rank"],
        "rank_ratio": spectrum["rank_ratio"],
        "feature_std": deviation,
        "collapsed": float(collapsed),
    }
    known = np.asarray(labels) >= 0
    if known.sum() > 2 and len(np.unique(labels[known])) > 1:
        x, y = features[known][:JUDGED_ROWS], np.asarray(labels)[known][:JUDGED_ROWS]
        values["knn_accuracy"] = leave_one_out(x, y, probe)
        values["probe_accuracy"] = ridge_folds(x, y)
    return values


def leave_one_out(features: np.ndarray, labels: np.ndarray, probe) -> float:
    """Return the percentage of samples whose class wins the vote of their k nearest other samples."""
    x = unit(features - features.mean(0))
    labels = np.asarray(labels)
    hits = 0
    for rows in np.array_split(np.arange(len(x)), -(-len(x) // 1024)):
        similar = x[rows] @ x.T
        similar[np.arange(len(rows)), rows] = -np.inf
        k = min(probe.knn_k, len(x) - 1)
        nearest = np.argpartition(-similar, k - 1, axis=1)[:, :k]
        weights = np.exp(np.take_along_axis(similar, nearest, axis=1) / probe.knn_temperature)
        votes = np.zeros((len(rows), int(labels.max()) + 1))
        np.add.at(votes, (np.arange(len(rows))[:, None], labels[nearest]), weights)
        hits += int((votes.argmax(1) == labels[rows]).sum())
    return 100 * hits / len(x)


def ridge_folds(features: np.ndarray, labels: np.ndarray, folds: int = 5, penalty: float = 1e-2) -> float:
    """Return the cross-validated accuracy in percent of a closed-form linear probe (ridge regression on classes)."""
    x = (features - features.mean(0)) / (features.std(0) + 1e-8)
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    one_hot = np.eye(int(labels.max()) + 1)[labels]
    fold = np.random.default_rng(0).permutation(len(x)) % folds
    hits = 0
    for held in range(folds):
        train, test = fold != held, fold == held
        gram = x[train].T @ x[train] + penalty * train.sum() * np.eye(x.shape[1])
        weights = np.linalg.solve(gram, x[train].T @ one_hot[train])
        hits += int(((x[test] @ weights).argmax(1) == labels[test]).sum())
    return 100 * hits / len(x)


def unit(x: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; a zero row stays zero."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def pooled(features: np.ndarray, how: str = "mean") -> np.ndarray:
    """Pool [sample, token, width] to [sample, width] by "mean" or "max" over tokens; two axes pass through."""
    if features.ndim < 3:
        return features
    if how not in ("mean", "max"):
        raise ValueError(f"pooling={how!r} is unknown; known: mean, max")
    return features.mean(1) if how == "mean" else features.max(1)


def rank(features: np.ndarray, energy_share: float = 0.99) -> dict[str, float]:
    """Return rank statistics of centred features [sample, width].

    effective_rank: exp of the entropy of the singular values' shares. n_components_99: directions that hold
    energy_share of the variance, by which it is named.
    Source: Roy & Vetterli 2007; Garrido et al. 2023 (RankMe) without the centring.
    """
    x = np.asarray(features, np.float64)
    values = np.linalg.svd(x - x.mean(0), compute_uv=False)
    share = values / max(values.sum(), 1e-300)
    energy = np.square(values) / max(np.square(values).sum(), 1e-300)
    effective = float(np.exp(-(share * np.log(share + 1e-12)).sum()))
    return {
        "effective_rank": effective,
        "rank_ratio": effective / x.shape[1],
        "feature_dim": x.shape[1],
        f"n_components_{100 * energy_share:g}": int(np.argmax(np.cumsum(energy) >= energy_share)) + 1,
        "variance_first_component": float(energy[0]),
        "variance_first_10": float(energy[:10].sum()),
        "singular_value_max": float(values.max()),
        "singular_value_mean": float(values.mean()),
    }


def spread(features: np.ndarray) -> dict[str, float]:
    """Return per-dimension variances, and covariance and correlation between dimensions.

    The means over pairs of dimensions count all width^2 entries.
    """
    x = np.asarray(features, np.float64)
    variance = x.var(0)
    covariance = np.atleast_2d(np.cov(x.T))
    deviation = np.sqrt(np.diag(covariance))
    scale = np.outer(deviation, deviation)
    correlation = np.divide(covariance, scale, out=np.zeros_like(covariance), where=scale > 0)
    return {
        "mean_variance": float(variance.mean()),
        "std_variance": float(variance.std()),
        "min_variance": float(variance.min()),
        "max_variance": float(variance.max()),
        "mean_feature": float(x.mean()),
        "std_feature": float(x.std()),
        "mean_covariance_off_diag": float((covariance - np.diag(np.diag(covariance))).mean()),
        "mean_abs_correlation_off_diag": float(np.abs(correlation - np.eye(len(correlation))).mean()),
    }


def isotropy(features: np.ndarray) -> dict[str, float]:
    """Return cosine similarities of different samples. uniformity: log mean exp(2 similarity) (Wang & Isola 2020)."""
    x = np.asarray(features, np.float64)
    rows = x / (np.linalg.norm(x, axis=1, keepdims=True) + 1e-8)
    similarity = rows @ rows.T
    others = similarity[~np.eye(len(x), dtype=bool)]
    return {
        "mean_similarity": float(others.mean()),
        "std_similarity": float(others.std()),
        "max_similarity": float(others.max()),
        "min_similarity": float(others.min()),
        "mean_self_similarity": float(np.diag(similarity).mean()),
        "uniformity": float(np.log(np.exp(2 * others).mean())),
    }


def quality(features: np.ndarray, pooling: str = "mean") -> dict[str, dict]:
    """Return rank, statistics, isotropy and collapse flags of features [sample, (token,) width]."""
    x = pooled(np.asarray(features), pooling)
    results = {"rank": rank(x), "statistics": spread(x), "isotropy": isotropy(x)}
    return results | {"collapse": collapse(results["rank"], results["statistics"])}


def collapse(spectrum: dict, statistics: dict, rank_ratio: float = 0.1, mean_variance: float = 0.01) -> dict[str, bool]:
    """Return which limits the results of `rank` and `spread` fall below, and `any_collapse`."""
    flags = {
        "rank_collapse": spectrum["rank_ratio"] < rank_ratio,
        "variance_collapse": statistics["mean_variance"] < mean_variance,
        "dimension_collapse": spectrum["n_components_99"] < 0.1 * spectrum["feature_dim"],
    }
    return flags | {"any_collapse": any(flags.values())}


def batch_rank(features: np.ndarray, rows: int = 100) -> float:
    """Return the original's collapse metric: effective rank of the first rows, flattened, uncentred; NaN for zeros."""
    x = np.asarray(features, np.float32).reshape(len(features), -1)[:rows]
    values = np.linalg.svd(x, compute_uv=False)
    if not values.any():
        return float("nan")
    share = values / values.sum()
    return float(np.exp(-(share * np.log(share + 1e-8)).sum()))


def collapse_metrics(context: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Compute the original's logged statistics of a batch: std of all elements, mean row norm, rank (<= batch size).

    As in the original, the rank is left out if features are not finite.
    """
    values = {}
    for name, features in (("context", context), ("target", target)):
        rows = np.asarray(features).reshape(len(features), -1)
        values[f"{name}_std"] = float(rows.std(ddof=1))
        values[f"{name}_norm"] = float(np.linalg.norm(rows, axis=1).mean())
        if np.isfinite(rows).all():
            values[f"{name}_eff_rank"] = batch_rank(rows)
    return values
