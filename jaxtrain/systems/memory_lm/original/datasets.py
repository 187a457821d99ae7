"""The original's TextDataset and create_dataloader, with its rules for encoding rows of text."""

from typing import Any

import torch

from jaxtrain.systems.memory_lm import data
from jaxtrain.systems.memory_lm.config import Data
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from jaxtrain.systems.memory_lm.tokenizers import ByteTokenizer, PretrainedTokenizer


class TextDataset(torch.utils.data.Dataset):
    """Dataset of int64 tensors input_ids, attention_mask and labels [max_length], encoded by the original's rules.

    dataset_name: a local file or folder, or a hub id. tokenizer: a transformers tokenizer; if it has no padding token,
    its end token becomes one. An unknown training_mode raises UserError, a ValueError, when an item is read.
    """

    def __init__(
        self,
        dataset_name: str,
        tokenizer: Any,
        max_length: int = 8192,
        split: str = "train",
        subset: str | None = None,
        text_field: str | list[str] = "text",
        training_mode: str = "pretraining",
        num_samples: int | None = None,
    ):
        section = Data(dataset_name=dataset_name, dataset_subset=subset, text_field=text_field)
        self.dataset_name, self.split, self.subset, self.num_samples = dataset_name, split, subset, num_samples
        self.tokenizer, self.max_length = tokenizer, max_length
        self.text_field, self.training_mode = text_field, training_mode
        self.dataset = list(data.read_rows(section, split, num_samples))
        name = str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
        self._inner = tokenizer if isinstance(tokenizer, ByteTokenizer) else PretrainedTokenizer(tokenizer, name)
        if tokenizer.pad_token_id is None and getattr(tokenizer, "eos_token", None) is not None:
            tokenizer.pad_token = tokenizer.eos_token

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        encoder = Encoder(self._inner, self.max_length, self.training_mode, self.text_field, original=True)
        return {key: torch.from_numpy(value).long() for key, value in encoder.padded(self.dataset[index]).items()}


def create_dataloader(
    dataset_name: str,
    tokenizer: Any,
    batch_size: int,
    max_length: int = 8192,
    split: str = "train",
    subset: str | None = None,
    text_field: str | list[str] = "text",
    training_mode: str = "pretraining",
    num_workers: int = 4,
    shuffle: bool = True,
    num_samples: int | None = None,
    drop_last: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> torch.utils.data.DataLoader:
    """Return a torch DataLoader over a TextDataset."""
    dataset = TextDataset(dataset_name, tokenizer, max_length, split, subset, text_field, training_mode, num_samples)
    return torch.utils.data.DataLoader(
        dataset, batch_size, shuffle=shuffle, num_workers=num_workers, drop_last=drop_last, generator=generator
    )
