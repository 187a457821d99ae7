"""The original's datasets of episodes for the world model, as torch Datasets of {"frames", "actions"}."""

import pathlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from jaxtrain.errors import UserError


class SyntheticSequentialDataset(Dataset):
    """Random episodes: frames uniform in [0, 1) [seq_len, channels, S, S], actions uniform in [-1, 1).

    seed: item i is drawn from seed + i, the same at every access; None draws anew from torch's generator.
    """

    def __init__(
        self,
        num_episodes: int,
        seq_len: int,
        image_size: int = 64,
        channels: int = 3,
        action_dim: int = 4,
        seed: int | None = None,
    ):
        self.num_episodes, self.seq_len, self.image_size = num_episodes, seq_len, image_size
        self.channels, self.action_dim, self.seed = channels, action_dim, seed
        self.generator = None if seed is None else torch.Generator()

    def __len__(self) -> int:
        return self.num_episodes

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = range(len(self))[index]
        if self.generator is not None:
            self.generator.manual_seed(self.seed + index)
        shape = (self.seq_len, self.channels, self.image_size, self.image_size)
        frames = torch.rand(shape, generator=self.generator)
        actions = 2 * torch.rand((self.seq_len, self.action_dim), generator=self.generator) - 1
        return {"frames": frames, "actions": actions}


class EpisodeFileSequentialDataset(Dataset):
    """Windows of seq_len steps from a folder of .pt files with frames [L, C, H, W] and actions [L, A].

    Files are taken in sorted order; shorter ones are left out. random_window: one window per file, its start drawn anew
    with Python's generator; False: every window in order. transform: of the frames. Raises FileNotFoundError without
    the folder, and ValueError if no file is long enough.
    """

    def __init__(
        self,
        root_dir: str | pathlib.Path,
        seq_len: int,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
        random_window: bool = True,
    ):
        self.root_dir, self.seq_len = pathlib.Path(root_dir), seq_len
        self.transform, self.random_window = transform, random_window
        if not self.root_dir.is_dir():
            raise FileNotFoundError(f"root_dir: {root_dir} is no folder")
        lengths = {path: len(self._read(path)["frames"]) for path in sorted(self.root_dir.glob("*.pt"))}
        self.episode_files = [path for path, length in lengths.items() if length >= seq_len]
        if not self.episode_files:
            raise UserError(f"root_dir: {root_dir} has no .pt file of {seq_len} steps or more")
        starts = lambda path: [None] if random_window else range(lengths[path] - seq_len + 1)
        self._windows = [(path, start) for path in self.episode_files for start in starts(path)]

    @staticmethod
    def _read(path: pathlib.Path) -> dict[str, torch.Tensor]:
        return torch.load(path, map_location="cpu", weights_only=True)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        path, start = self._windows[index]
        episode = self._read(path)
        if start is None:
            start = random.randint(0, len(episode["frames"]) - self.seq_len)
        part = slice(start, start + self.seq_len)
        frames = episode["frames"][part].float()
        frames = frames if self.transform is None else self.transform(frames)
        return {"frames": frames, "actions": episode["actions"][part].float()}


def build_sequential_dataloader(
    dataset: Dataset, batch_size: int, num_workers: int = 0, shuffle: bool = True, pin_memory: bool = False
) -> DataLoader:
    """Return a DataLoader that stacks episodes: frames [batch, step, C, H, W], actions [batch, step, A]."""
    return DataLoader(dataset, batch_size, shuffle=shuffle, num_workers=num_workers, pin_memory=pin_memory)


def build_dataloader(
    dataset: Dataset,
    batch_size: int,
    num_workers: int = 4,
    pin_memory: bool = True,
    shuffle: bool = True,
    drop_last: bool = True,
    **kwargs: Any,
) -> DataLoader:
    """Return torch's DataLoader with the original's defaults. kwargs: further ones of DataLoader."""
    options = {"num_workers": num_workers, "pin_memory": pin_memory and torch.cuda.is_available()}
    return DataLoader(dataset, batch_size, shuffle=shuffle, drop_last=drop_last, **options, **kwargs)
