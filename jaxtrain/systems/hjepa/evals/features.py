"""Judging features without labels: rank, spread, isotropy, collapse. numpy float64."""

import numpy as np


def pooled(features: np.ndarray, how: str = "mean") -> np.ndarray:
    """[sample, token, width] -> [sample, width] by "mean" or "max" over tokens; two axes pass through."""
    if features.ndim < 3:
        return features
    if how not in ("mean", "max"):
        raise ValueError(f"pooling={how!r} is unknown; known: mean, max")
    return features.mean(1) if how == "mean" else features.max(1)


def rank(features: np.ndarray) -> dict[str, float]:
    """Of features [sample, width], centred. effective_rank: exp of the entropy of the singular values' shares.

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
        "n_components_99": int(np.argmax(np.cumsum(energy) >= 0.99)) + 1,
        "variance_first_component": float(energy[0]),
        "variance_first_10": float(energy[:10].sum()),
        "singular_value_max": float(values.max()),
        "singular_value_mean": float(values.mean()),
    }


def spread(features: np.ndarray) -> dict[str, float]:
    """Per-dimension variances and how dimensions move together. The means over pairs count all width^2 entries."""
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
    """Cosine similarities of different samples. uniformity: log mean exp(2 similarity), after Wang & Isola 2020."""
    x = np.asarray(features, np.float64)
    unit = x / (np.linalg.norm(x, axis=1, keepdims=True) + 1e-8)
    similarity = unit @ unit.T
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
    """rank, statistics, isotropy and collapse flags of features [sample, (token,) width]."""
    x = pooled(np.asarray(features), pooling)
    found = {"rank": rank(x), "statistics": spread(x), "isotropy": isotropy(x)}
    flags = {
        "rank_collapse": found["rank"]["rank_ratio"] < 0.1,
        "variance_collapse": found["statistics"]["mean_variance"] < 0.01,
        "dimension_collapse": found["rank"]["n_components_99"] < 0.1 * x.shape[1],
    }
    return found | {"collapse": flags | {"any_collapse": any(flags.values())}}


def batch_rank(features: np.ndarray, rows: int = 100) -> float:
    """The original's collapse metric: effective rank of the first rows, flattened and not centred."""
    x = np.asarray(features, np.float32).reshape(len(features), -1)[:rows]
    values = np.linalg.svd(x, compute_uv=False)
    share = values / values.sum()
    return float(np.exp(-(share * np.log(share + 1e-8)).sum()))


def collapse_metrics(context: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """What the original logs of a batch: std over all elements, mean row norm, `batch_rank`. At most the batch size."""
    found = {}
    for name, features in (("context", context), ("target", target)):
        rows = np.asarray(features).reshape(len(features), -1)
        found[f"{name}_std"] = float(rows.std(ddof=1))
        found[f"{name}_norm"] = float(np.linalg.norm(rows, axis=1).mean())
        found[f"{name}_eff_rank"] = batch_rank(rows)
    return found
