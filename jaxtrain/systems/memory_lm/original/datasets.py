"""TextDataset and create_dataloader, by the original's rules for rows of text."""

from typing import Any

import torch

from jaxtrain.systems.memory_lm import data
from jaxtrain.systems.memory_lm.config import Data
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from jaxtrain.systems.memory_lm.tokenizers import PretrainedTokenizer


class TextDataset(torch.utils.data.Dataset):
    """Rows of a dataset as int64 tensors input_ids, attention_mask and labels of max_length, by the original's rules.

    dataset_name: a local file or folder, or a hub id. tokenizer: a transformers tokenizer.
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
        self.rows = list(data.read_rows(section, split, num_samples))
        inner = PretrainedTokenizer(tokenizer, str(tokenizer.name_or_path))
        self.encoder = Encoder(inner, max_length, training_mode, text_field, original=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(value).long() for key, value in self.encoder.padded(self.rows[index]).items()}


def create_dataloader(
    dataset_name: str,
    tokenizer: Any,
    batch_size: int,
    max_length: int,
    split: str = "train",
    subset: str | None = None,
    text_field: str | list[str] = "text",
    training_mode: str = "pretraining",
    num_workers: int = 4,
    shuffle: bool = True,
    num_samples: int | None = None,
    drop_last: bool = True,
) -> torch.utils.data.DataLoader:
    """A torch DataLoader over TextDataset."""
    dataset = TextDataset(dataset_name, tokenizer, max_length, split, subset, text_field, training_mode, num_samples)
    return torch.utils.data.DataLoader(
        dataset, batch_size, shuffle=shuffle, num_workers=num_workers, drop_last=drop_last
    )
