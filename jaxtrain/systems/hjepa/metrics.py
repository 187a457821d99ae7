"""Metrics of pre-training: cheap signs of collapse inside the step, exact ones after an evaluation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.hjepa.evals import features as quality
from jaxtrain.systems.hjepa.evals.knn import unit
from jaxtrain.task import Statistics

JUDGED_ROWS = 5000  # neighbours and the probe see at most so many validation samples


class CollapseWarning(UserWarning):
    """Features of different images have become the same, or span few directions."""


def in_step(context, target, valid) -> dict[str, jax.Array]:
    """Scalars of a training batch, over the whole batch on all devices.

    context, target: [batch, token, width]. *_std: standard deviation over images of the pooled features, mean over
    dimensions; it goes to 0 when all images look the same. *_norm: mean length of a token. target_directions: the
    participation ratio (sum of eigenvalues)^2 / sum of their squares of the pooled targets' covariance, at most the
    batch size.
    """
    weight = valid.astype(jnp.float32) / jnp.maximum(valid.sum(), 1)
    found = {}
    for name, tokens in (("context", context), ("target", target)):
        tokens = jax.lax.stop_gradient(tokens).astype(jnp.float32)
        rows = tokens.mean(1)
        centred = (rows - weight @ rows) * jnp.sqrt(weight)[:, None]
        found[f"{name}_std"] = jnp.sqrt(jnp.square(centred).sum(0)).mean()
        found[f"{name}_norm"] = (weight * jnp.linalg.norm(tokens, axis=-1).mean(1)).sum()
        if name == "target":
            gram = centred @ centred.T
            found["target_directions"] = jnp.square(jnp.trace(gram)) / jnp.maximum(jnp.square(gram).sum(), 1e-30)
    return found


def eval_statistics(outputs, batch, config) -> Statistics:
    label = batch["label"] if "label" in batch else jnp.full(batch["valid"].shape, -1)
    return Statistics(rows={"features": outputs["features"], "label": label})


def compute(sums, rows, config) -> dict[str, float]:
    """Rank, spread and neighbours of the validation features; in percent where an accuracy."""
    return after_evaluation(rows["features"], rows["label"], config.probe)


def after_evaluation(features: np.ndarray, labels: np.ndarray, probe) -> dict[str, float]:
    """Metrics of validation features [sample, width]: rank, spread, and where labels are known (>= 0) neighbours.

    probe: a ProbeConfig. `collapsed` is 1 where the effective rank or the spread is below its limit; a CollapseWarning
    says so.
    """
    features = np.asarray(features, np.float64)
    if len(features) < 2 or not np.isfinite(features).all():
        return {"collapsed": float(not np.isfinite(features).all())}
    rank = quality.rank(features)
    spread = float(features.std(0).mean())
    collapsed = rank["rank_ratio"] < probe.collapse_rank_ratio or spread < probe.collapse_std
    if collapsed:
        warnings.warn(
            f"features have collapsed or are about to: effective rank {rank['effective_rank']:.2f} of "
            f"{rank['feature_dim']} (limit {probe.collapse_rank_ratio:g} of it), standard deviation over images "
            f"{spread:.2g} (limit {probe.collapse_std:g}). Use an EMA target (model.use_target_encoder), a regulariser "
            "(loss.type: hjepa_sigreg or combined), or a lower optim.lr",
            CollapseWarning,
            stacklevel=2,
        )
    found = {
        "effective_rank": rank["effective_rank"],
        "rank_ratio": rank["rank_ratio"],
        "feature_std": spread,
        "collapsed": float(collapsed),
    }
    known = np.asarray(labels) >= 0
    if known.sum() > 2 and len(np.unique(labels[known])) > 1:
        x, y = features[known][:JUDGED_ROWS], np.asarray(labels)[known][:JUDGED_ROWS]
        found["knn_accuracy"] = leave_one_out(x, y, probe)
        found["probe_accuracy"] = ridge_folds(x, y)
    return found


def leave_one_out(features: np.ndarray, labels: np.ndarray, probe) -> float:
    """Percent of samples whose class their k nearest others vote for."""
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
    """Percent right of a linear probe in closed form (ridge regression on classes), each fifth held out in turn."""
    x = (features - features.mean(0)) / (features.std(0) + 1e-8)
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    wanted = np.eye(int(labels.max()) + 1)[labels]
    fold = np.random.default_rng(0).permutation(len(x)) % folds
    hits = 0
    for held in range(folds):
        train, test = fold != held, fold == held
        gram = x[train].T @ x[train] + penalty * train.sum() * np.eye(x.shape[1])
        weights = np.linalg.solve(gram, x[train].T @ wanted[train])
        hits += int(((x[test] @ weights).argmax(1) == labels[test]).sum())
    return 100 * hits / len(x)
