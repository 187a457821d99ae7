"""The original's data functions with its arguments: from pandas frames to torch Datasets and DataLoaders."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from jaxtrain.systems.set_completion import masking, vocabulary
from jaxtrain.systems.set_completion.data import split_rows


class SetDataset(masking.SetDataset, Dataset):
    """masking.SetDataset with torch tensors as items: (visible ids, [weapon], full set), int64 and ragged."""

    def __init__(self, df, vocab_size=None, num_instances_per_set=5, skew_factor=1.2, null_token: int | None = None):
        super().__init__(df, vocab_size, num_instances_per_set, skew_factor, null_token)
        self.df, self.raw_num_instances_per_set = df, num_instances_per_set
        self.uses_null_token = null_token is not None
        self.ability_tags = [row["ability_tags"] for row in self.rows]
        self.weapon_ids = [row["weapon_id"] for row in self.rows]
        self.distribution_cache: dict[int, np.ndarray] = {}

    @property
    def num_instances_per_set(self) -> int:
        """Return the number of items per row, with that of the null token."""
        return self.instances

    def weighted_random_removals(self, max_removals: int) -> int:
        """Draw how many tokens to hide, 1 .. max_removals, from numpy's global generator."""
        if max_removals not in self.distribution_cache:
            self.distribution_cache[max_removals] = masking.removal_probabilities(max_removals, self.skew_factor)
        return int(np.random.choice(np.arange(1, max_removals + 1), p=self.distribution_cache[max_removals]))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        visible, weapon, whole = map(torch.from_numpy, super().__getitem__(index))
        return visible, weapon, whole


def create_collate_fn(PAD_ID: int):
    """Return a collate function for SetDataset's items.

    It returns (inputs, weapons, targets, attention_mask), padded on the right; the mask is True for real tokens.
    """

    def collate(items):
        inputs, weapons, targets = zip(*(tuple(map(torch.as_tensor, item)) for item in items), strict=True)
        pad = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
        inputs = pad(inputs)
        lengths = torch.tensor([len(item[0]) for item in items])[:, None]
        return inputs, torch.stack(weapons).reshape(-1, 1), pad(targets), torch.arange(inputs.shape[1]) < lengths

    return collate


def generate_tokenized_datasets(
    df,
    frac: float = 0.1,
    random_state: int | np.random.RandomState | None = None,
    validation_size: float = 0.1,
    test_size: float = 0.2,
):
    """Return (train, validation, test) frames: a shuffled fraction of the rows, cut into contiguous pieces.

    Rows keep their index.
    """
    pieces = split_rows(len(df), frac, random_state, validation_size, test_size)
    return tuple(df.iloc[pieces[name]] for name in ("train", "validation", "test"))


def generate_dataloaders(
    train_set,
    validation_set,
    test_set,
    vocab_size: int,
    pad_token_id: int,
    num_instances_per_set: int = 5,
    skew_factor: float = 1.2,
    null_token_id: int | None = None,
    distributed: bool = False,
    shuffle_train: bool = True,
    *,
    drop_last: bool = True,
    **kwargs: Any,
) -> tuple[DataLoader, DataLoader, DataLoader]:
    """Return DataLoaders of SetDatasets over three frames; only the training rows are shuffled.

    kwargs: of torch's DataLoader (batch_size 32, num_workers 0, ...); `shuffle` is not used. drop_last: applies to the
    training loader only. The original drops the last incomplete batch of validation and test too, so those rows never
    count. distributed: use a DistributedSampler over JAX's processes; `train_model` sets its epoch.
    """
    options = {"batch_size": 32, "num_workers": 0, **kwargs}
    options.pop("shuffle", None)
    collate = create_collate_fn(pad_token_id)
    loaders = []
    for number, df in enumerate((train_set, validation_set, test_set)):
        dataset = SetDataset(df, vocab_size, num_instances_per_set, skew_factor, null_token_id)
        first = number == 0
        shuffle = first and shuffle_train and len(dataset) > 0
        order = {"sampler": _share(dataset, shuffle)} if distributed else {"shuffle": shuffle}
        loaders.append(DataLoader(dataset, collate_fn=collate, drop_last=first and drop_last, **order, **options))
    return tuple(loaders)


def _share(dataset: Dataset, shuffle: bool) -> DistributedSampler:
    """Return a sampler of this process's part of the rows."""
    return DistributedSampler(dataset, jax.process_count(), jax.process_index(), shuffle)


def tokenize(df, ability_to_id: Mapping[str, int] | None = None, weapon_to_id: Mapping[str, int] | None = None):
    """Return (frame with lists of token ids and weapon ids, ability_to_id, weapon_to_id) for a frame of tag strings.

    The vocabularies are extended by new names; see vocabulary.tokenize.
    """
    rows, weapons, abilities, weapon_vocabulary = vocabulary.tokenize(
        list(df["ability_tags"]), list(df["weapon_id"]), ability_to_id, weapon_to_id
    )
    return df.assign(ability_tags=rows, weapon_id=weapons), abilities, weapon_vocabulary
