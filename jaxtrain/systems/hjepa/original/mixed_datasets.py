"""The original's mixtures of several torch Datasets; items gain the number of their Dataset."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.datasets import build_dataset


class _Mixture(Dataset):
    """datasets: at least one. dataset_names: dataset_0, ... if left out."""

    def __init__(self, datasets: Sequence[Any], dataset_names: Sequence[str] | None = None):
        if not datasets:
            raise UserError("datasets: got none, wanted at least one")
        self.datasets, self.num_datasets = list(datasets), len(datasets)
        names = [f"dataset_{i}" for i in range(len(datasets))] if dataset_names is None else list(dataset_names)
        if len(names) != len(datasets):
            raise UserError(f"dataset_names: {len(names)} names for {len(datasets)} datasets")
        self.dataset_names, self.dataset_sizes = names, [len(one) for one in datasets]

    def _item(self, number: int, row: int) -> tuple:
        item = self.datasets[number][row]
        return (*item, number) if isinstance(item, tuple) else (item, number)


class WeightedMultiDataset(_Mixture):
    """Each access draws a Dataset by its weight, then a row of it, from Python's generator; the index does not matter.

    As long as the largest Dataset. weights: share of each, equal if left out; raised to 1 / temperature and scaled to
    sum 1 (attribute `weights`). Raises ValueError for another count, a negative weight, or all of them 0.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | None = None,
        dataset_names: Sequence[str] | None = None,
        temperature: float = 1.0,
    ):
        super().__init__(datasets, dataset_names)
        raw = np.asarray([1.0] * len(datasets) if weights is None else weights, float)
        if len(raw) != len(datasets) or (raw < 0).any() or not raw.sum() > 0 or temperature <= 0:
            raise UserError(
                f"weights={raw.tolist()}, temperature={temperature}: wanted {len(datasets)} weights of 0 or more, "
                "one above 0, and a positive temperature"
            )
        shares = (raw / raw.sum()) ** (1 / temperature)
        self.weights, self.temperature = (shares / shares.sum()).tolist(), temperature
        self.cumulative_sizes = np.cumsum(self.dataset_sizes).tolist()
        self.total_size, self.effective_size = sum(self.dataset_sizes), max(self.dataset_sizes)

    def __len__(self) -> int:
        return self.effective_size

    def __getitem__(self, index: int) -> tuple:
        range(len(self))[index]  # IndexError ends a loop over the Dataset
        number = random.choices(range(self.num_datasets), self.weights)[0]
        return self._item(number, random.randrange(self.dataset_sizes[number]))

    def get_dataset_stats(self) -> dict[str, dict[str, float]]:
        """Return {name: {"size", "weight"}}, the weights scaled to sum 1."""
        rows = zip(self.dataset_names, self.dataset_sizes, self.weights, strict=True)
        return {name: {"size": size, "weight": weight} for name, size, weight in rows}


class BalancedMultiDataset(_Mixture):
    """As many rows of each Dataset as the smallest has, drawn and shuffled once with Python's generator.

    samples_per_dataset: another number of each, at most the smallest's size.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        dataset_names: Sequence[str] | None = None,
        samples_per_dataset: int | None = None,
    ):
        super().__init__(datasets, dataset_names)
        least = min(self.dataset_sizes)
        if samples_per_dataset is not None and not 0 < samples_per_dataset <= least:
            raise UserError(
                f"samples_per_dataset={samples_per_dataset}: wanted 1 to {least}, the smallest dataset's size"
            )
        self.samples_per_dataset = samples_per_dataset or least
        self.resample_indices()

    def resample_indices(self) -> None:
        """Draw other rows, in another order."""
        chosen = [random.sample(range(size), self.samples_per_dataset) for size in self.dataset_sizes]
        self._rows = [(number, row) for number, rows in enumerate(chosen) for row in rows]
        random.shuffle(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple:
        return self._item(*self._rows[index])


def build_multi_dataset(
    dataset_configs: Sequence[Mapping[str, Any]],
    data_path: str,
    split: str = "train",
    sampling_strategy: str = "weighted",
    **kwargs: Any,
) -> Dataset:
    """Return a mixture of `build_dataset` for each of dataset_configs, {"name", "weight" (1), "path" (data_path)}.

    sampling_strategy: weighted, balanced or concat (one after another, items unchanged). kwargs: of `build_dataset`.
    """
    known = {"weighted", "balanced", "concat"}
    if sampling_strategy not in known:
        raise UserError(f"sampling_strategy={sampling_strategy!r} is unknown; known: {', '.join(sorted(known))}")
    parts = [build_dataset(one["name"], one.get("path") or data_path, split, **kwargs) for one in dataset_configs]
    names = [one["name"] for one in dataset_configs]
    if sampling_strategy == "concat":
        return ConcatDataset(parts)
    if sampling_strategy == "balanced":
        return BalancedMultiDataset(parts, names)
    return WeightedMultiDataset(parts, [one.get("weight", 1.0) for one in dataset_configs], names)
