"""The original's splits and loaders, under its names, for torch code outside a jaxtrain run."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, random_split

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import splits
from jaxtrain.systems.criteria_evidence.original import datasets

NAMES = ("train", "val", "test")


def get_optimal_dataloader_kwargs(
    device: Any,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = 2,
) -> dict[str, Any]:
    """Return keyword arguments for a torch DataLoader.

    By default up to 8 workers with a CUDA device, and up to 4 (half the CPUs) without.
    """
    cuda = torch.device(device).type == "cuda"
    cpus = os.cpu_count() or 1
    if num_workers is None:
        num_workers = min(cpus, 8) if cuda else min(cpus // 2, 4)
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": cuda if pin_memory is None else pin_memory}
    options["persistent_workers"] = num_workers > 0 and (persistent_workers is None or persistent_workers)
    if num_workers > 0 and prefetch_factor is not None:
        options["prefetch_factor"] = prefetch_factor
    return options


def random_split_indices(size: int, seed: int = 42) -> dict[str, list[int]]:
    """Return the row indices of the original's 80/10/10 split with that seed."""
    return splits.random_split(size, seed)


def split_dataset(dataset: Dataset, seed: int = 42) -> tuple[Subset, Subset, Subset]:
    """Split 80/10/10 as the original's scripts do: torch's random_split with a generator of that seed."""
    train, val = int(0.8 * len(dataset)), int(0.1 * len(dataset))
    generator = torch.Generator().manual_seed(seed)
    first, second, third = random_split(dataset, [train, val, len(dataset) - train - val], generator=generator)
    return first, second, third


def create_dataloaders(
    train_dataset: Dataset,
    val_dataset: Dataset,
    test_dataset: Dataset | None = None,
    train_batch_size: int = 32,
    eval_batch_size: int = 64,
    **kwargs: Any,
) -> tuple[DataLoader, ...]:
    """Return DataLoaders of the splits; only training is shuffled.

    kwargs: passed to DataLoader, for example those of get_optimal_dataloader_kwargs. No test loader without a test set.
    """
    held_out = [one for one in (val_dataset, test_dataset) if one is not None]
    loaders = [DataLoader(one, batch_size=eval_batch_size, shuffle=False, **kwargs) for one in held_out]
    return (DataLoader(train_dataset, batch_size=train_batch_size, shuffle=True, **kwargs), *loaders)


# --- by post -----------------------------------------------------------------------------------------------------


def group_split_by_post_id(
    df: Any,
    post_id_col: str = "post_id",
    train_ratio: float = 0.7,
    val_ratio: float = 0.15,
    test_ratio: float = 0.15,
    random_seed: int = 42,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the post ids of training, validation and test, disjoint. df: a DataFrame, or a sequence of ids.

    Raises UserError if the ratios do not add up to 1 or there are too few posts.
    """
    if abs(train_ratio + val_ratio + test_ratio - 1) > 1e-6:
        raise UserError(f"train, val and test ratios add up to {train_ratio + val_ratio + test_ratio:g}, wanted 1")
    ids = df[post_id_col].tolist() if hasattr(df, "columns") else list(df)
    names = splits.group_names_split(list(dict.fromkeys(ids)), random_seed, (train_ratio, val_ratio, test_ratio))
    return names["train"], names["validation"], names["test"]


def save_splits_json(
    train_post_ids: Sequence[Any],
    val_post_ids: Sequence[Any],
    test_post_ids: Sequence[Any],
    output_path: str | pathlib.Path,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a splits.json: the ids of each split, and `metadata` with their counts."""
    parts = dict(zip(NAMES, map(list, (train_post_ids, val_post_ids, test_post_ids)), strict=True))
    counts = {f"{name}_count": len(ids) for name, ids in parts.items()}
    path = pathlib.Path(output_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {**(metadata or {}), **counts, "total_count": sum(counts.values())}
    path.write_text(json.dumps({**parts, "metadata": described}, indent=2, default=str), encoding="utf-8")


def load_splits_json(splits_path: str | pathlib.Path) -> dict[str, Any]:
    """Return the content of a splits.json. Raises FileNotFoundError, and ValueError if a post is in two splits."""
    path = pathlib.Path(splits_path)
    if not path.is_file():
        raise datasets.MissingFile(f"{path}: no such splits file; group_split_by_post_id makes one")
    content = json.loads(path.read_text(encoding="utf-8"))
    splits.check_disjoint({name: content.get(name, []) for name in NAMES})
    return content


# --- by shares ---------------------------------------------------------------------------------------------------


def _shares(dataset: Dataset, ratios: Sequence[float]) -> tuple[Subset, ...]:
    """Split randomly with torch's global generator; each size is the floor of its share, and the remaining rows go one
    each to the first splits. Raises UserError if the ratios do not add up to 1."""
    if abs(sum(ratios) - 1) > 1e-3:
        raise UserError(f"splits {list(ratios)} add up to {sum(ratios):g}, wanted 1")
    sizes = [int(len(dataset) * ratio) for ratio in ratios]
    for i in range(len(dataset) - sum(sizes)):
        sizes[i % len(sizes)] += 1
    return tuple(random_split(dataset, sizes))


def _loader_of(kind: type[Dataset]):
    def load(splits: Sequence[float] | Mapping[str, float] | None = None, **dataset_kwargs: Any) -> Any:
        dataset = kind(**dataset_kwargs)
        if splits is None:
            return dataset
        return _shares(dataset, list(splits.values()) if isinstance(splits, Mapping) else list(splits))

    load.__doc__ = f"A {kind.__name__}, or its shares by `splits` as a tuple of Subsets."
    return load


load_criteria_dataset = _loader_of(datasets.CriteriaDataset)
load_evidence_dataset = _loader_of(datasets.EvidenceDataset)
load_share_dataset = _loader_of(datasets.ShareDataset)
load_joint_dataset = _loader_of(datasets.JointDataset)


class ClassificationDataset(Dataset):
    """Dataset of a DataFrame's texts, or pairs of texts, with labels, all tokenized at once.

    Items hold input_ids, attention_mask and labels, and criterion_index, post_id and criterion_id if the frame has such
    columns. tokenizer: a transformers tokenizer, or one with the same call. label_dtype: int or float. Raises KeyError
    for a missing column and ValueError for another label_dtype.
    """

    DTYPES = {"int": torch.long, "float": torch.float32}

    def __init__(
        self,
        dataframe: Any,
        tokenizer: Any,
        max_length: int,
        text_column: str,
        text_pair_column: str | None = None,
        label_column: str = "label",
        label_dtype: str = "int",
    ):
        if label_dtype not in self.DTYPES:
            raise UserError(f"label_dtype: {label_dtype!r}, wanted one of {', '.join(self.DTYPES)}")
        columns = [text_column, label_column, *([text_pair_column] if text_pair_column else [])]
        absent = [name for name in columns if name not in dataframe.columns]
        if absent:
            raise datasets.MissingColumn(f"no column {', '.join(absent)}; it has {', '.join(dataframe.columns)}")
        texts = [dataframe[name].astype(str).tolist() for name in (text_column, text_pair_column) if name]
        options = {"padding": "max_length", "truncation": True, "max_length": max_length, "return_tensors": "pt"}
        encoded = tokenizer(*texts, **options)
        self.input_ids, self.attention_mask = encoded["input_ids"], encoded["attention_mask"]
        self.labels = torch.tensor(dataframe[label_column].tolist(), dtype=self.DTYPES[label_dtype])
        column = lambda name: dataframe[name].tolist() if name in dataframe.columns else None
        self.post_ids, self.criterion_ids = column("post_id"), column("criterion_id")
        self.criterion_indices = column("criterion_index")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {"input_ids": self.input_ids[index], "attention_mask": self.attention_mask[index]}
        item["labels"] = self.labels[index]
        if self.criterion_indices is not None:
            item["criterion_index"] = torch.tensor(int(self.criterion_indices[index]))
        extra = {"post_id": self.post_ids, "criterion_id": self.criterion_ids}
        return item | {name: values[index] for name, values in extra.items() if values is not None}
