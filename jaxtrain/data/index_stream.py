"""One order of samples, as a function of (seed, epoch, position) only.

Processes, devices, workers and gradient accumulation slice it, so the batches are the same on any number of each.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class IndexStream:
    """Global batches of sample positions.

    size: samples in the dataset. batch_size: samples per optimizer step, over all processes.
    """

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self):
        if self.size < 1:
            raise UserError("the dataset is empty: it has no sample to train on")
        if self.steps_per_epoch < 1:
            raise UserError(
                f"data.batch_size: {self.batch_size} is more than the dataset's {self.size} samples and data.drop_last "
                f"leaves no batch; take at most {self.size}, or data.drop_last=false"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions int64 [batch_size] and valid bool [batch_size] of the batch that `step` (0-based) trains on.

        The last batch of an epoch may be uneven: it is filled up with its first sample, marked not valid.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _order(self.size, self.seed, epoch, self.shuffle)
        indices = order[place * self.batch_size : (place + 1) * self.batch_size]
        valid = np.arange(self.batch_size) < len(indices)
        return np.concatenate([indices, np.full(self.batch_size - len(indices), indices[0])]), valid


class SampleIndex(int):
    """A sample's position in the dataset, with the epoch that asks for it.

    A source that draws anew in every epoch (augmentation, masks) seeds itself with both, so that a resumed run and
    worker processes draw the same.
    """

    epoch: int = 0

    @classmethod
    def of(cls, index: int, epoch: int) -> "SampleIndex":
        self = cls(index)
        self.epoch = epoch
        return self


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


class SamplerStream:
    """Global batches in the order that a source brings (sources.OrderedSource), as `IndexStream` gives them.

    batch_size: rows of a batch; a shorter one is filled up.
    """

    def __init__(self, source: Any, batch_size: int, seed: int = 0):
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self._epochs: dict[int, list[list[int]]] = {}
        self.steps_per_epoch = len(self._epoch(0))
        if not self.steps_per_epoch:
            raise UserError("the DataLoader gives no batch: its sampler is empty, or drop_last leaves nothing")

    @property
    def size(self) -> int:
        return len(self.source)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, place = divmod(step, self.steps_per_epoch)
        indices = np.asarray(self._epoch(epoch)[place], np.int64)
        if not 0 < len(indices) <= self.batch_size:
            raise UserError(
                f"batch {place} of epoch {epoch} has {len(indices)} samples, data.batch_size is {self.batch_size}: set "
                "it to the largest that the batch_sampler gives"
            )
        valid = np.arange(self.batch_size) < len(indices)
        return np.concatenate([indices, np.full(self.batch_size - len(indices), indices[0])]), valid

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            batches = self.source.epoch_batches(epoch, self.seed)
            if epoch and len(batches) != self.steps_per_epoch:
                raise UserError(
                    f"the DataLoader's sampler gives {len(batches)} batches in epoch {epoch} and "
                    f"{self.steps_per_epoch} in epoch 0; wanted the same number in every epoch"
                )
            self._epochs = {key: value for key, value in self._epochs.items() if key >= epoch - 1} | {epoch: batches}
        return self._epochs[epoch]


class IterableStream:
    """Global batches of a source that cannot be asked for by position (sources.SequentialSource).

    once: one pass and no more, as evaluation wants. Positions count the samples of an epoch as they come.
    """

    def __init__(self, source: Any, batch_size: int, once: bool = False):
        self.source, self.batch_size, self.once = source, batch_size, once
        self.steps_per_epoch: int | None = source.steps_per_epoch(batch_size)
        self.size: int | None = source.size

    def place(self, step: int) -> tuple[int, int]:
        """Epoch, and position in it, of a step."""
        return divmod(step, self.steps_per_epoch) if self.steps_per_epoch else (0, step)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        first = self.place(step)[1] * self.batch_size
        return np.arange(first, first + self.batch_size), np.ones(self.batch_size, bool)
