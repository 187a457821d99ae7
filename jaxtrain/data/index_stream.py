"""One order of samples, as a function of (seed, epoch, position) only.

Processes, devices, workers and gradient accumulation slice it, so the batches are the same on any number of each.
"""

import dataclasses
import functools

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
        self.epoch = int(epoch)
        return self


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)
