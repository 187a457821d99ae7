"""Names that users of the torch original know, for scripts that change their imports only."""

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.systems.criteria_evidence import examples, splits
from jaxtrain.systems.criteria_evidence.csv_files import criterion_map, criterion_text, read_criteria, read_rows  # noqa: F401


def set_seed(seed: int = 42, deterministic: bool = True, cudnn_benchmark: bool = False) -> int:
    """Seed python, numpy and torch, and set torch's determinism as the original does. Gives the seed back.

    A jaxtrain run needs none of it (its randomness is a function of config.seed); torch code beside it may.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
    os.environ["PYTHONHASHSEED"] = str(seed)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    return seed


def get_device(prefer_cuda: bool = True, device_id: int = 0) -> torch.device:
    """cuda:device_id where there is one, else the CPU."""
    return torch.device(f"cuda:{device_id}" if prefer_cuda and torch.cuda.is_available() else "cpu")


def get_optimal_dataloader_kwargs(
    device: Any,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = 2,
) -> dict[str, Any]:
    """Keyword arguments for a torch DataLoader: up to 8 workers beside a GPU, up to 4 beside a CPU."""
    cuda = torch.device(device).type == "cuda"
    cpus = os.cpu_count() or 1
    if num_workers is None:
        num_workers = min(cpus, 8) if cuda else min(cpus // 2, 4)
    found: dict[str, Any] = {"num_workers": num_workers, "pin_memory": cuda if pin_memory is None else pin_memory}
    found["persistent_workers"] = num_workers > 0 and (persistent_workers is None or persistent_workers)
    if num_workers > 0 and prefetch_factor is not None:
        found["prefetch_factor"] = prefetch_factor
    return found


def compute_total_steps(num_batches: int, gradient_accumulation_steps: int, num_epochs: int) -> int:
    """Optimizer steps of a run: a last, incomplete group counts; 0 batches give 0."""
    return -(-num_batches // max(gradient_accumulation_steps, 1)) * max(num_epochs, 1) if num_batches else 0


def random_split_indices(size: int, seed: int = 42) -> dict[str, list[int]]:
    """The rows of the original's 80/10/10 split with that seed."""
    return splits.random_split(size, seed)


class _Dataset(torch.utils.data.Dataset):
    """Rows of a CSV as padded token tensors. tokenizer: a `jaxtrain...tokenization.Tokenizer`, a transformers fast
    tokenizer, or what `tokenization.load` takes. pair: read (text, criterion), as family architectures does.

    As in the original, a row whose answer cannot be found raises when it is read.
    """

    architecture = ""

    def __init__(
        self,
        csv_path: str,
        tokenizer: Any,
        max_length: int = 256,
        evidence_max_length: int = 512,
        pair: bool = False,
        criteria_path: str | None = None,
        **columns: str,
    ):
        named = examples.Columns(**columns)
        required = [named.status, named.sentence] + ([] if self.architecture == "criteria" else [named.context])
        self.tokenizer = as_tokenizer(tokenizer)
        self.widths = {"": max_length if self.architecture == "criteria" else evidence_max_length}
        self.widths |= {"criteria_": max_length, "evidence_": evidence_max_length}
        self.examples = examples.make_examples(
            read_rows(csv_path, required),
            self.tokenizer,
            self.architecture,
            pair=pair,
            criterion_texts=read_criteria(criteria_path) if criteria_path else None,
            columns=named,
            max_length=max_length,
            evidence_max_length=evidence_max_length,
        )

    def __len__(self) -> int:
        return len(next(iter(self.examples.texts.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in self.examples.problems:
            raise ValueError(self.examples.problems[index])
        item: dict[str, np.ndarray] = {}
        for side, encoded in self.examples.texts.items():
            found = examples.padded(encoded, [index], self.widths[side], self.tokenizer.pad_id)
            item |= {f"{side}{name}": column[0] for name, column in found.items()}
        tensors = {name: torch.from_numpy(column).long() for name, column in item.items()}
        if self.examples.labels is not None:
            tensors["labels"] = torch.tensor(int(self.examples.labels[index]))
        if self.examples.spans is not None:
            for name, place in zip(("start_positions", "end_positions"), self.examples.spans[index], strict=True):
                tensors[name] = torch.tensor(int(place))
        return tensors


class CriteriaDataset(_Dataset):
    architecture = "criteria"


class EvidenceDataset(_Dataset):
    architecture = "evidence"


class JointDataset(_Dataset):
    architecture = "joint"


class ShareDataset(_Dataset):
    architecture = "share"


def as_tokenizer(tokenizer: Any):
    from jaxtrain.systems.criteria_evidence import tokenization

    if isinstance(tokenizer, tokenization.Tokenizer):
        return tokenizer
    if hasattr(tokenizer, "backend_tokenizer"):
        return tokenization.Tokenizer(tokenizer.backend_tokenizer, tokenizer.pad_token, "transformers")
    return tokenization.load(tokenizer)


def criterion_texts(entries: list[Mapping[str, str]]) -> dict[str, str]:
    return criterion_map(entries)
