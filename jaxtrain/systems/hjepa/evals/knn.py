"""Nearest-neighbour evaluations of frozen features: kNN with a weighted vote, and few-shot classification."""

import numpy as np

from jaxtrain.systems.hjepa.metrics import pooled, unit


class KNN:
    """k-nearest-neighbour classifier that weights the training features by their distance d.

    distance_metric "cosine" weights by exp((1 - d) / temperature), "euclidean" by exp(-d / temperature). As in the
    original, d under "cosine" is the Euclidean distance if features are normalised (same order, other weights) and the
    cosine distance if they are not.
    """

    def __init__(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        k: int = 20,
        distance_metric: str = "cosine",
        pooling: str = "mean",
        temperature: float = 0.07,
        normalize: bool = True,
    ):
        if distance_metric not in ("cosine", "euclidean"):
            raise ValueError(f"distance_metric={distance_metric!r} is unknown; known: cosine, euclidean")
        self.pooling, self.normalize, self.metric = pooling, normalize, distance_metric
        self.temperature, self.k = temperature, min(k, len(features))
        self.labels = np.asarray(labels)
        self.classes = int(self.labels.max()) + 1
        self.features = self._prepare(features)

    def _prepare(self, features: np.ndarray) -> np.ndarray:
        x = pooled(np.asarray(features), self.pooling).astype(np.float64)
        return unit(x) if self.normalize else x

    def _distances(self, x: np.ndarray) -> np.ndarray:
        if self.metric == "cosine" and not self.normalize:
            return 1 - unit(x) @ unit(self.features).T
        squares = np.square(x).sum(1)[:, None] + np.square(self.features).sum(1) - 2 * x @ self.features.T
        return np.sqrt(np.maximum(squares, 0))

    def predict(self, features: np.ndarray, chunk: int = 1024) -> tuple[np.ndarray, np.ndarray]:
        """Return predicted classes int64 [sample] and votes float64 [sample, class], which sum to 1."""
        votes = [self._votes(part) for part in np.array_split(self._prepare(features), -(-len(features) // chunk))]
        votes = np.concatenate(votes)
        return votes.argmax(1), votes

    def _votes(self, x: np.ndarray) -> np.ndarray:
        distances = self._distances(x)
        nearest = np.argsort(distances, axis=1, kind="stable")[:, : self.k]
        near = np.take_along_axis(distances, nearest, axis=1)
        closeness = (1 - near if self.metric == "cosine" else -near) / self.temperature
        weights = np.exp(closeness - closeness.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        votes = np.zeros((len(x), self.classes))
        np.add.at(votes, (np.arange(len(x))[:, None], self.labels[nearest]), weights)
        return votes

    def evaluate(self, features: np.ndarray, labels: np.ndarray, top_k: tuple[int, ...] = (1, 5)) -> dict[str, float]:
        """Return accuracy and top_k_accuracy, in percent."""
        predicted, votes = self.predict(features)
        labels = np.asarray(labels)
        metrics = {"accuracy": 100 * float((predicted == labels).mean())}
        ranked = np.argsort(-votes, axis=1, kind="stable")
        for k in top_k:
            metrics[f"top_{k}_accuracy"] = 100 * float((ranked[:, :k] == labels[:, None]).any(1).mean())
        return metrics


def few_shot(
    features: np.ndarray,
    labels: np.ndarray,
    n_way: int = 5,
    k_shot: int = 5,
    n_query: int = 15,
    episodes: int = 100,
    seed: int = 42,
) -> dict[str, float]:
    """Return the mean accuracy in percent, and its 95 % interval, of the nearest class centroid over random episodes.

    Raises ValueError if fewer than n_way classes have k_shot + 1 samples.
    Source: Snell et al. 2017.
    """
    x, labels = unit(pooled(np.asarray(features, np.float64))), np.asarray(labels)
    places = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    places = [members for members in places if len(members) > k_shot]
    if len(places) < n_way:
        raise ValueError(f"{len(places)} classes have more than {k_shot} samples; n_way={n_way} needs as many classes")
    rng = np.random.default_rng(seed)
    scores = []
    for _ in range(episodes):
        chosen = [rng.permutation(places[i]) for i in rng.choice(len(places), n_way, replace=False)]
        centroids = np.stack([x[members[:k_shot]].mean(0) for members in chosen])
        queries = [members[k_shot : k_shot + n_query] for members in chosen]
        answers = np.repeat(np.arange(n_way), [len(query) for query in queries])
        distances = np.square(x[np.concatenate(queries)][:, None] - centroids).sum(-1)
        scores.append(100 * (distances.argmin(1) == answers).mean())
    return {"accuracy": float(np.mean(scores)), "interval": float(1.96 * np.std(scores) / np.sqrt(episodes))}
