"""Modules and Datasets for the example configs and the tests: small, offline, deterministic."""

import difflib
import pathlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from jaxtrain import hub
from jaxtrain.data.digits import load_digits
from jaxtrain.errors import UserError
from torch_bridge.torchvision_operators import declare_torchvision


class DigitsNet(nn.Module):
    """Small classifier of 8 x 8 digits: convolution, attention over rows, dropout. image: float [batch, 1, 8, 8]."""

    def __init__(self, width: int = 16, classes: int = 10, dropout: float = 0.1):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.rows = nn.Linear(8 * width, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, image):
        rows = nn.functional.gelu(self.norm(self.conv(image))).permute(0, 2, 3, 1).flatten(2)
        return self.head(self.encoder(self.rows(rows)).mean(1))


class Named(Dataset):
    """Dataset of dicts, from named tensors."""

    def __init__(self, **columns: torch.Tensor):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


SPLITS = {"train": (0, 1437), "validation": (1437, 1617), "test": (1617, 1797)}


def digits(split: str, size: int = 8, channels: int = 1, limit: int | None = None) -> Dataset:
    """Return scikit-learn's digits as {image: float [channel, size, size], label: int}; larger sizes repeat pixels."""
    images, labels = load_digits()
    start, end = SPLITS[split]
    chosen = slice(start, end if limit is None else min(end, start + limit))
    images = torch.from_numpy(images[chosen].astype(np.float32)).reshape(-1, 1, 8, 8) / 16
    images = images.repeat_interleave(size // 8, 2).repeat_interleave(size // 8, 3).expand(-1, channels, -1, -1)
    return Named(image=images.contiguous(), label=torch.from_numpy(labels[chosen]))


def digits_tuples(split: str, limit: int | None = None) -> Dataset:
    """Return `digits` as a TensorDataset of (image, label) tuples."""
    named = digits(split, limit=limit)
    return TensorDataset(named.columns["image"], named.columns["label"])


def keywords(split: str, samples: int = 256, length: int = 16, vocabulary: int = 100, labels: int = 2) -> Dataset:
    """Return padded sentences of random tokens for text classifiers; the label is the keyword that a sentence contains.

    Items are {input_ids, attention_mask: int [length], labels: int}.
    """
    rng = np.random.default_rng(["train", "validation", "test"].index(split))
    tokens = rng.integers(10 + labels, vocabulary, (samples, length))
    classes = rng.integers(0, labels, samples)
    sizes = rng.integers(length // 2, length + 1, samples)
    tokens[np.arange(samples), rng.integers(1, length // 2, samples)] = 10 + classes
    mask = np.arange(length) < sizes[:, None]
    tokens = np.where(mask, tokens, 0)
    return Named(
        input_ids=torch.from_numpy(tokens),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        labels=torch.from_numpy(classes),
    )


def hugging_face(head: str, name: str | None = None, model_type: str | None = None, **settings: Any) -> nn.Module:
    """Return a transformers model. head: name of an Auto class, like "AutoModelForSequenceClassification".

    name: a hub id or local folder, for pretrained weights. model_type ("bert", "llama", ...): instead of name, for
    random weights. settings: entries of its config. Raises UserError if the class or the model cannot be found.
    """
    declare_torchvision()
    if name is not None and not pathlib.Path(name).expanduser().is_dir():
        hub.cache_only_if_unreachable()
    import transformers

    auto = getattr(transformers, head, None)
    if auto is None:
        near = difflib.get_close_matches(head, [known for known in dir(transformers) if known.startswith("AutoModel")])
        raise UserError(f"model.kwargs.head: transformers has no {head!r}; near it are {', '.join(near) or 'none'}")
    if name is None:
        return auto.from_config(transformers.AutoConfig.for_model(model_type, **settings))
    try:
        return auto.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        folder = pathlib.Path(name).expanduser()
        if folder.exists():
            raise UserError(f"model.kwargs.name: {name} holds no model for {head}: {_line(error)}") from error
        if name.startswith((".", "/", "~")):
            raise UserError(f"model.kwargs.name: there is no folder {name}") from error
        raise UserError(
            f"model.kwargs.name: {name!r} is no folder here and cannot be downloaded ({_line(error)}). Where there is "
            f"a network, `hf download {name} --local-dir {folder.name}`; then model.kwargs.name={folder.name}"
        ) from error


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def timm(model_name: str, **settings: Any) -> nn.Module:
    """Return `timm.create_model(model_name, **settings)`. Raises UserError without timm, and for an unknown model."""
    declare_torchvision()
    try:
        import timm
    except ModuleNotFoundError as error:
        raise UserError(f"model.target: this model is timm's, and there is no {error.name}: pip install timm") from None
    known = timm.list_models()
    if model_name.partition(".")[0] not in known and ":" not in model_name:
        near = difflib.get_close_matches(model_name, known)
        raise UserError(f"model.kwargs.model_name: timm has no {model_name!r}; near it are {', '.join(near) or 'none'}")
    return timm.create_model(model_name, **settings)
