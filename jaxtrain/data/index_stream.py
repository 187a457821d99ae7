"""The order of samples, a function of (seed, epoch, position) only.

Processes, devices, workers and gradient accumulation take slices of it, so any number of each gives the same batches.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from jaxtrain.data import random_state
from jaxtrain.data.stream_shards import Sharding
from jaxtrain.errors import UserError
from torch_bridge.sources import BatchOrder, OrderedSource, SequentialSource, raised


@dataclasses.dataclass(frozen=True)
class IndexStream:
    """Global batches of sample positions.

    size: samples in the dataset. batch_size: samples per optimizer step, over all processes. picked: the positions
    that are the dataset, of a larger one; None for all.
    """

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    picked: np.ndarray | None = dataclasses.field(default=None, compare=False)

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

    def steps_of(self, epochs: int) -> int:
        """Return the number of batches in so many epochs."""
        return epochs * self.steps_per_epoch

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the number of its batch in the epoch."""
        return divmod(step, self.steps_per_epoch)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions int64 [batch_size] and valid bool [batch_size] of the batch of `step` (0-based).

        The last batch of an epoch may be short: it is padded with its first sample, marked as not valid.
        """
        epoch, place = self.place(step)
        order = _order(self.size, self.seed, epoch, self.shuffle)
        indices = order[place * self.batch_size : (place + 1) * self.batch_size]
        indices = indices if self.picked is None else self.picked[indices]
        valid = np.arange(self.batch_size) < len(indices)
        return np.concatenate([indices, np.full(self.batch_size - len(indices), indices[0])]), valid


class SampleIndex(int):
    """A sample's position in the dataset, with the epoch that it is read for.

    A source that draws random numbers in every epoch (augmentation, masks) seeds itself with both, so that a resumed
    run and worker processes draw the same numbers.
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
    """Global batches in the order of a sampler (torch_bridge.sources.OrderedSource), in the form of `IndexStream`.

    batch_size: rows of a batch; shorter batches are padded. None: the size of the largest batch. The number of batches
    may differ between epochs, so the batches of the run are counted first. epochs, steps: the length of the run; a
    sampler that never ends needs `steps`.
    """

    def __init__(
        self, source: OrderedSource, batch_size: int | None, seed: int = 0, epochs: int = 1, steps: int | None = None
    ):
        self.source, self.seed = source, seed
        self._order: BatchOrder | None = None
        self._next = 0  # the epoch that the order yields next
        self._epochs: dict[int, list[np.ndarray]] = {}
        self._most = None if source.constant else steps or ENDLESS * (1 + len(source))
        self._counts: list[int] = []
        self._count(epochs, steps)
        self.batch_size = batch_size or source.batch_size or self._largest

    def follow(self, step: int) -> None:
        """Apply the user's changes to the sampler, for the epochs that begin at `step` or later."""
        if self.source.follow(self._order):
            epoch, place = self.place(step)
            self._epochs = {key: value for key, value in self._epochs.items() if key < epoch + bool(place)}

    def _count(self, epochs: int, steps: int | None) -> None:
        self._largest, total = 0, 0
        while total < steps if steps else len(self._counts) < epochs:
            batches = self._epoch(len(self._counts))
            if not batches:
                raise UserError("the DataLoader gives no batch: its sampler is empty, or drop_last leaves nothing")
            if not steps and len(batches) == self._most:
                raise UserError(
                    f"the DataLoader's sampler has given {self._most} batches for {len(self.source)} samples and goes "
                    "on: a sampler that does not end needs train.steps"
                )
            self._counts.append(len(batches))
            self._largest = max(self._largest, *map(len, batches))
            total += len(batches)
            if self.source.constant:
                break
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch; the mean, rounded up, if epochs differ."""
        return -(-sum(self._counts) // len(self._counts))

    def steps_of(self, epochs: int) -> int:
        """Return the number of batches in so many epochs."""
        return epochs * self._counts[0] if self.source.constant else int(sum(self._counts[:epochs]))

    @property
    def size(self) -> int:
        return len(self.source)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the number of its batch in the epoch."""
        if self.source.constant:
            return divmod(step, self._counts[0])
        while step >= self._starts[-1]:  # beyond the epochs that were counted
            self._starts = np.append(self._starts, self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        epoch = int(np.searchsorted(self._starts, step, side="right")) - 1
        return epoch, step - int(self._starts[epoch])

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, place = self.place(step)
        indices = self._epoch(epoch)[place]
        if not 0 < len(indices) <= self.batch_size:
            raise UserError(
                f"batch {place} of epoch {epoch} has {len(indices)} samples, data.batch_size is {self.batch_size}: set "
                "it to the largest that the batch_sampler gives"
            )
        valid = np.arange(self.batch_size) < len(indices)
        return np.concatenate([indices, np.full(self.batch_size - len(indices), indices[0])]), valid

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._epochs:
            batches = self._draw(epoch)
            known = self._counts[:1] if self.source.constant else self._counts[epoch : epoch + 1]
            if known not in ([], [len(batches)]):
                raise UserError(
                    f"the DataLoader's sampler gives {len(batches)} batches in epoch {epoch}, and {known[0]} were "
                    "counted before the run, by which its length was set: keep their number as it is, or end the run "
                    "here and start another with the changed sampler"
                )
            self._epochs = {key: value for key, value in self._epochs.items() if key >= epoch - 1} | {epoch: batches}
        return self._epochs[epoch]

    def draw_anew(self) -> None:
        """Forget the batches drawn so far, because the source would draw other ones now."""
        self._order, self._epochs = None, {}

    def _draw(self, epoch: int) -> list[np.ndarray]:
        """Draw an epoch's batches; first the earlier epochs, if the order depends on them (positions, no samples)."""
        if self._order is None or (self.source.replays and epoch < self._next):
            self._order, self._next = self.source.begin(), 0
        first = self._next if self.source.replays else epoch
        for number in range(first, epoch + 1):
            with random_state.seeded(self.source, self.seed, number):
                batches = self._batches(self._order, number)
        self._next = epoch + 1
        return batches

    def _batches(self, order: BatchOrder, epoch: int) -> list[np.ndarray]:
        batches: list[np.ndarray] = []
        try:
            for batch in itertools.islice(order.epoch(epoch), self._most):
                batches.append(_positions(batch, self.source))
        except UserError:
            raise
        except BaseException as error:
            raise raised(error, f"batch {len(batches)} of epoch {epoch}", f"the DataLoader's {order.named}") from error
        return batches


ENDLESS = 20  # an epoch with more batches than this many times the dataset's samples counts as endless


def _positions(batch: Any, source: OrderedSource) -> np.ndarray:
    try:
        return np.array([source.position(index) for index in batch], np.int64)
    except (TypeError, ValueError):
        raise UserError(
            f"the DataLoader's batch_sampler gives {str(batch)[:80]}, wanted a list of positions in the dataset"
        ) from None


class FirstBatches:
    """The first `count` batches of another stream, repeated: the same samples in the same order.

    The dataset sees every pass as epoch 0, so that its augmentation repeats too.
    """

    drop_last = False

    def __init__(self, stream: "IndexStream | SamplerStream | FirstBatches", count: int):
        self.stream = stream
        self.steps_per_epoch = min(count, stream.steps_per_epoch)
        self.batch_size = stream.batch_size
        self.size = sum(int(self.batch(step)[1].sum()) for step in range(self.steps_per_epoch))

    def steps_of(self, epochs: int) -> int:
        """Return the number of batches in so many epochs."""
        return epochs * self.steps_per_epoch

    def place(self, step: int) -> tuple[int, int]:
        """Return epoch 0 and the number of the step's batch in a pass."""
        return 0, step % self.steps_per_epoch

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return self.stream.batch(step % self.steps_per_epoch)


class IterableStream:
    """Global batches of a source without random access (torch_bridge.sources.SequentialSource).

    once: make a single pass, as for evaluation. sharding: how processes and workers divide the stream; each shard then
    restarts when it ends, so there are no epochs. Positions number the samples of an epoch in the order they arrive.
    """

    def __init__(self, source: SequentialSource, batch_size: int, once: bool = False, sharding: Sharding | None = None):
        self.source, self.batch_size, self.once, self.sharding = source, batch_size, once, sharding
        endless = once or sharding is not None
        self.steps_per_epoch: int | None = None if endless else source.steps_per_epoch(batch_size)
        self.size: int | None = source.size

    @property
    def promise(self) -> str:
        """Describe the number of batches in an epoch, for messages."""
        shared = f" (of {self.size} samples, shared evenly by {self.source.workers} workers)"
        return f"{self.steps_per_epoch} batches" + (shared if self.source.workers > 1 and self.size else "")

    def steps_of(self, epochs: int) -> int | None:
        """Return the number of batches in so many epochs, None if unknown."""
        return self.steps_per_epoch and epochs * self.steps_per_epoch

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the number of its batch in the epoch."""
        return divmod(step, self.steps_per_epoch) if self.steps_per_epoch else (0, step)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        first = self.place(step)[1] * self.batch_size
        return np.arange(first, first + self.batch_size), np.ones(self.batch_size, bool)


class MoreThanPromised(UserError):
    """Raised if a stream yields more than its `__len__`."""

    def __init__(self, epoch: int, promise: str):
        super().__init__(
            f"the dataset gives more than the {promise} in epoch {epoch} that its __len__ promises, by which "
            "the run's length was set: correct __len__, or remove it and set train.steps"
        )
