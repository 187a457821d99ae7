"""The original's nearest-neighbour evaluation of a model's features."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.evals.knn import KNN
from jaxtrain.systems.hjepa.metrics import pooled
from jaxtrain.systems.hjepa.original.features import extract_features


class KNNEvaluator:
    """Weighted vote of the k nearest training features; see `jaxtrain.systems.hjepa.evals.knn.KNN` for the weights.

    distance_metric: cosine or euclidean. pooling: mean or max over tokens. build_knn_index comes first.
    """

    def __init__(
        self,
        model: nn.Module,
        hierarchy_level: int = 0,
        k: int = 20,
        distance_metric: str = "cosine",
        pooling: str = "mean",
        temperature: float = 0.07,
        device: str = "cuda",
    ):
        self.model, self.hierarchy_level, self.device = model, hierarchy_level, device
        self.k, self.distance_metric, self.pooling, self.temperature = k, distance_metric, pooling, temperature
        self.knn_index: KNN | None = None
        self.train_features: np.ndarray | None = None
        self.train_labels: np.ndarray | None = None

    def pool_features(self, features: Any) -> np.ndarray:
        """Return [row, width] from features [row, token, width]; features without tokens pass through."""
        return pooled(np.asarray(features), self.pooling)

    def extract_features(
        self, dataloader: Iterable, normalize: bool = True, desc: str = "Extracting features"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the target encoder's pooled features [row, width] and labels [row]."""
        options = {"pool": True, "pooling": self.pooling, "normalize": normalize, "desc": desc}
        return extract_features(self.model, dataloader, self.hierarchy_level, self.device, **options)

    def build_knn_index(self, train_loader: Iterable, normalize: bool = True) -> None:
        """Keep the training features, of which the nearest vote."""
        self.train_features, self.train_labels = self.extract_features(train_loader, normalize)
        self.knn_index = self._index(self.k, normalize)

    def _index(self, k: int, normalize: bool) -> KNN:
        options = {"distance_metric": self.distance_metric, "temperature": self.temperature, "normalize": normalize}
        return KNN(self.train_features, self.train_labels, k, **options)

    def _built(self) -> KNN:
        if self.knn_index is None:
            raise UserError("KNNEvaluator: call build_knn_index(train_loader) first")
        return self.knn_index

    def predict(self, test_features: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return classes int64 [row] and votes float64 [row, num_classes], which sum to 1."""
        predicted, votes = self._built().predict(test_features)
        return predicted, np.pad(votes, [(0, 0), (0, max(0, num_classes - votes.shape[1]))])

    def evaluate(
        self,
        test_loader: Iterable,
        num_classes: int,
        normalize: bool = True,
        top_k_list: Sequence[int] = (1, 5),
        verbose: bool = True,
    ) -> dict[str, float]:
        """Return accuracy and top_k_accuracy in percent. num_classes: not used, as the index knows the classes."""
        features, labels = self.extract_features(test_loader, normalize)
        metrics = self._built().evaluate(features, labels, tuple(top_k_list))
        if verbose:
            print(", ".join(f"{name} {value:.2f}" for name, value in metrics.items()))
        return metrics

    def evaluate_multiple_k(
        self,
        test_loader: Iterable,
        num_classes: int,
        k_values: Sequence[int] = (1, 5, 10, 20, 50, 100, 200),
        normalize: bool = True,
        verbose: bool = True,
    ) -> dict[int, float]:
        """Return the accuracy in percent for each k that is at most the number of training rows."""
        self._built()
        features, labels = self.extract_features(test_loader, normalize)
        counts = [k for k in k_values if k <= len(self.train_labels)]
        accuracies = {k: self._index(k, normalize).evaluate(features, labels)["accuracy"] for k in counts}
        if verbose:
            print(", ".join(f"k={k}: {value:.2f}" for k, value in accuracies.items()))
        return accuracies


def knn_eval(
    model: nn.Module,
    train_loader: Iterable,
    test_loader: Iterable,
    num_classes: int,
    hierarchy_level: int = 0,
    k: int = 20,
    distance_metric: str = "cosine",
    temperature: float = 0.07,
    device: str = "cuda",
    verbose: bool = True,
) -> dict[str, float]:
    """Return what KNNEvaluator.evaluate does, for the neighbours among train_loader's rows."""
    options = {"distance_metric": distance_metric, "temperature": temperature, "device": device}
    evaluator = KNNEvaluator(model, hierarchy_level, k, **options)
    evaluator.build_knn_index(train_loader)
    return evaluator.evaluate(test_loader, num_classes, verbose=verbose)


def sweep_knn_params(
    model: nn.Module,
    train_loader: Iterable,
    test_loader: Iterable,
    num_classes: int,
    hierarchy_level: int = 0,
    k_values: Sequence[int] = (10, 20, 50, 100, 200),
    temperatures: Sequence[float] = (0.01, 0.05, 0.07, 0.1, 0.5),
    distance_metrics: Sequence[str] = ("cosine", "euclidean"),
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Return {"k", "temperature", "distance_metric", "accuracy" in percent} of each combination, the best first.

    Features are computed once; a k above the number of training rows is left out.
    """
    evaluator = KNNEvaluator(model, hierarchy_level, device=device)
    train, test = (evaluator.extract_features(loader) for loader in (train_loader, test_loader))
    results = []
    for metric, temperature, k in itertools.product(distance_metrics, temperatures, k_values):
        if k <= len(train[1]):
            voters = KNN(*train, k, distance_metric=metric, temperature=temperature)
            one = {"k": k, "temperature": temperature, "distance_metric": metric}
            results.append(one | {"accuracy": voters.evaluate(*test)["accuracy"]})
    return sorted(results, key=lambda one: -one["accuracy"])
