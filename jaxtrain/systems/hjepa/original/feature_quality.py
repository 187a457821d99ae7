"""The original's analysis of a model's features: rank, spread, isotropy, collapse."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa import metrics
from jaxtrain.systems.hjepa.original.features import extract_features


class FeatureQualityAnalyzer:
    """Statistics of the target encoder's features, pooled over tokens. The numbers are those of
    `jaxtrain.systems.hjepa.metrics.quality`, which equal the original's to 1e-6."""

    def __init__(self, model: nn.Module, hierarchy_level: int = 0, device: str = "cuda"):
        self.model, self.hierarchy_level, self.device = model, hierarchy_level, device

    def extract_features(
        self,
        dataloader: Iterable,
        max_samples: int | None = None,
        pool: bool = True,
        normalize: bool = False,
        desc: str = "Extracting features",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return features [row, width], or [row, token, width] without `pool`, and labels [row]."""
        options = {"pool": pool, "normalize": normalize, "max_samples": max_samples, "desc": desc}
        return extract_features(self.model, dataloader, self.hierarchy_level, self.device, **options)

    def compute_effective_rank(self, features: np.ndarray) -> float:
        """Return exp of the entropy of the shares of the singular values of centred features [row, width]."""
        return metrics.rank(features)["effective_rank"]

    def compute_rank_analysis(self, features: np.ndarray, variance_threshold: float = 0.99) -> dict[str, float]:
        """Return `metrics.rank`; n_components_99 is named by variance_threshold."""
        return metrics.rank(features, variance_threshold)

    def compute_feature_statistics(self, features: np.ndarray) -> dict[str, float]:
        """Return `metrics.spread`: variances, covariance and correlation of the dimensions."""
        return metrics.spread(features)

    def compute_isotropy(self, features: np.ndarray) -> dict[str, float]:
        """Return `metrics.isotropy`: cosine similarities of different rows, and uniformity."""
        return metrics.isotropy(features)

    def detect_collapse(
        self, features: np.ndarray, threshold_rank_ratio: float = 0.1, threshold_variance: float = 0.01
    ) -> dict[str, bool]:
        """Return rank_collapse, variance_collapse, dimension_collapse and any_collapse."""
        limits = (threshold_rank_ratio, threshold_variance)
        return metrics.collapse(metrics.rank(features), metrics.spread(features), *limits)

    def compute_all_metrics(self, dataloader: Iterable, max_samples: int | None = 10000) -> dict[str, dict]:
        """Return {"rank", "statistics", "isotropy", "collapse"} of the loader's first max_samples rows."""
        return metrics.quality(self.extract_features(dataloader, max_samples)[0])

    def visualize_features_tsne(
        self,
        features: np.ndarray,
        labels: np.ndarray | None,
        n_components: int = 2,
        perplexity: float = 30.0,
        random_state: int = 42,
    ) -> np.ndarray:
        """Return t-SNE coordinates float [row, n_components] for a plot. labels: not used."""
        from sklearn.manifold import TSNE

        return TSNE(n_components, perplexity=perplexity, random_state=random_state).fit_transform(np.asarray(features))

    def visualize_features_umap(
        self,
        features: np.ndarray,
        labels: np.ndarray | None,
        n_components: int = 2,
        n_neighbors: int = 15,
        min_dist: float = 0.1,
        random_state: int = 42,
    ) -> np.ndarray:
        """Return UMAP coordinates [row, n_components] for a plot. labels: not used. Raises UserError without umap."""
        try:
            import umap
        except ImportError:
            raise UserError("UMAP needs a further package: pip install umap-learn") from None
        options = {"n_neighbors": n_neighbors, "min_dist": min_dist, "random_state": random_state}
        return umap.UMAP(n_components=n_components, **options).fit_transform(np.asarray(features))

    def compute_pca(self, features: np.ndarray, n_components: int = 50) -> tuple[np.ndarray, np.ndarray]:
        """Return principal coordinates [row, component] and each component's share of the variance."""
        from sklearn.decomposition import PCA

        features = np.asarray(features)
        pca = PCA(min(n_components, *features.shape))
        return pca.fit_transform(features), pca.explained_variance_ratio_


def analyze_feature_quality(
    model: nn.Module,
    dataloader: Iterable,
    hierarchy_level: int = 0,
    max_samples: int | None = 10000,
    device: str = "cuda",
) -> dict[str, dict]:
    """Return FeatureQualityAnalyzer.compute_all_metrics of one level."""
    return FeatureQualityAnalyzer(model, hierarchy_level, device).compute_all_metrics(dataloader, max_samples)


def compare_hierarchy_levels(
    model: Any,
    dataloader: Iterable,
    num_levels: int | None = None,
    max_samples: int | None = 10000,
    device: str = "cuda",
) -> dict[str, dict]:
    """Return `analyze_feature_quality` of each level as {"level_0": ..., ...}. num_levels=None means all."""
    levels = range(model.num_hierarchies if num_levels is None else num_levels)
    return {f"level_{i}": analyze_feature_quality(model, dataloader, i, max_samples, device) for i in levels}


def print_quality_report(metrics: Mapping[str, Mapping[str, Any]], verbose: bool = True) -> None:
    """Print the groups of `compute_all_metrics` as lines; without `verbose` the rank and collapse alone."""
    for group, values in metrics.items():
        if verbose or group in ("rank", "collapse"):
            print(group)
            for name, value in values.items():
                print(f"  {name}: {value:.6g}" if isinstance(value, float) else f"  {name}: {value}")
