"""Datasets that the bridge's tests read, in this process and in worker processes."""

import collections
import os
import random
import signal
import time

import numpy as np
import torch

Pair = collections.namedtuple("Pair", "a b")


class Items(torch.utils.data.Dataset):
    """Items of every kind; row i says so in each of them."""

    def __init__(self, size: int = 37):
        self.values = torch.arange(size, dtype=torch.float32)[:, None].repeat(1, 3)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {
            "x": self.values[index],
            "half": self.values[index].bfloat16(),
            "id": index,
            "double": np.float64(index),
            "pair": Pair(torch.tensor(index), (np.full(2, index, np.int16), True)),
        }


class Drawing(torch.utils.data.Dataset):
    """Augmentation with every global generator there is; only odd items draw."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index % 2 == 0:
            return torch.tensor([float(index), 0.0, 0.0, 0.0])
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class Epochs(torch.utils.data.Dataset):
    """Items that depend on the epoch, which it is told."""

    epoch = -1

    def __len__(self):
        return 8

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor([float(index), float(self.epoch)])


class Trouble(torch.utils.data.Dataset):
    """Sample 13 raises, dies or hangs."""

    def __init__(self, what: str):
        self.what = what

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 13:
            if self.what == "raise":
                raise KeyError("no such column")
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "exit":
                os._exit(3)
            time.sleep(3600)
        return torch.tensor(float(index))


class Stream(torch.utils.data.IterableDataset):
    """Numbers in order, shared among torch's workers where there are any; another start in every epoch."""

    def __init__(self, size: int = 21, counted: bool = False):
        self.size, self.epoch = size, 0
        if counted:
            self.__class__ = CountedStream

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for value in range(first, self.size, step):
            yield torch.tensor(100 * self.epoch + value)


class CountedStream(Stream):
    def __len__(self):
        return self.size


class Alone(torch.utils.data.IterableDataset):
    """Does not look at its worker."""

    def __iter__(self):
        yield from (torch.tensor(float(i)) for i in range(21))


def triple(items):
    """A collate_fn of a user's own."""
    return {"three": torch.stack([item["x"] for item in items]) * 3, "id": torch.tensor([item["id"] for item in items])}


def mark_worker(worker: int) -> None:
    """A worker_init_fn: leaves its number where `Marked` finds it."""
    torch.utils.data.get_worker_info().dataset.mark = 100 + worker


class Marked(torch.utils.data.Dataset):
    mark = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index, self.mark, torch.utils.data.get_worker_info().num_workers])
