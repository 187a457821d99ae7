"""Interface between another library's dataset and `jaxtrain.data`. Needs no torch.

jaxtrain.data reads a source, seeds the random generators and collates; a source only knows its dataset.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from jaxtrain.errors import DataError, UserError

Seeded = Callable[[int], contextlib.AbstractContextManager]


class RandomState(Protocol):
    """A global random generator that datasets draw from."""

    def get(self) -> Any: ...

    def set(self, state: Any, /) -> None: ...

    def seed(self, seed: int, /) -> None: ...

    def same(self, first: Any, second: Any, /) -> bool: ...


class ForeignSource:
    """Base class of map-style sources that follow another library's conventions.

    workers_wanted: number of worker processes, unless data.num_workers sets it. start_method: how to start them, or
    None. persistent: workers keep the dataset as it was when they started. collate: the source's own function of a list
    of items; None for the task's. examples: items already read as examples, by position, which the first epoch reuses.
    peek: reads examples when worker processes read the rest (jaxtrain.data.peek). worker_init_fn: the user's, which a
    worker calls before it reads. refills: it was seen to return the same memory for every sample, filled anew.
    """

    workers_wanted: int = 0
    start_method: str | None = None
    persistent: bool = False
    collate: Callable[[Sequence[Any]], Any] | None = None
    examples: Mapping[int, Any] = MappingProxyType({})
    peek: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    refills: bool = False

    def __getitem__(self, index: int) -> Any:
        raise TypeError(f"{type(self).__name__} gives no sample by its position")

    def raw(self, index: int) -> Any:
        """Return the sample at a position as the dataset yields it, tensors included."""
        return self[index]

    def converted(self, item: Any) -> Any:
        """Return a sample that `raw` gave as indexing gives it."""
        return item

    def random_states(self) -> list[RandomState]:
        """List further global generators that its items may draw from."""
        return []

    def enter_worker(self, worker: int, workers: int, seed: int) -> None:
        """Prepare a worker process; called once, before the first item."""

    def as_worker(self, workers: int) -> contextlib.AbstractContextManager:
        """Return a context in which the dataset sees this process as the first of `workers` worker processes."""
        return contextlib.nullcontext()

    def enter_thread(self) -> None:
        """Prepare the thread that reads ahead if there are no worker processes."""

    def shares_order(self, other: Any) -> bool:
        """Return True if reading `other` in its own library changes the order of this source."""
        return False

    def interleave(self, other: Any, passes: Callable[[int], int]) -> None:
        """Follow a source for which `shares_order` is True. passes: epoch number -> how many passes over it lie between
        the starts of the previous epoch and this one."""
        raise NotImplementedError

    def unkept_generators(self) -> list[str]:
        """Name the dataset's own random generators, which a resumed run starts anew."""
        return []

    def reducers(self) -> dict[type, Callable]:
        """Map types to functions that pickle their values for worker processes, as in copyreg."""
        return {}


class SequentialSource(ForeignSource):
    """Base class of sources that yield samples one after another and cannot be read by position.

    workers: how many processes may share an epoch without changing its order. size: samples per epoch, None if unknown.
    batch_size: set if the source decides it. ready_made: every chunk is already a whole batch. tells_places: `place`
    and the `place` argument of `chunks` are supported. apart: worker processes read it, each from a copy. begun: a pass
    started for an example, which the first epoch continues (jaxtrain.data.sample_reader).
    """

    workers: int = 1
    size: int | None = None
    batch_size: int | None = None
    ready_made: bool = False
    tells_places: bool = False
    apart: bool = False
    begun: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"begun": None}

    def chunks(
        self, epoch: int, worker: int, workers: int, batch_size: int, seeded: Seeded, place: Any = None
    ) -> Iterator[Any]:
        """Yield this worker's share of an epoch from its start, or from a place: lists of up to `batch_size` items.

        seeded: epoch -> a context in which every worker draws the same global random numbers.
        """
        raise TypeError(f"{type(self).__name__} must define chunks")

    def place(self) -> Any:
        """Return the position after the last chunk of the pass, in values that JSON can store."""
        return None

    @property
    def replays(self) -> bool:
        """Return True if a resumed run must read the earlier epochs again: the stream holds random generators whose
        state nothing else restores."""
        told = self.tells_places or hasattr(getattr(self, "dataset", None), "set_epoch")
        return not told and bool(self.unkept_generators())

    def steps_per_epoch(self, batch_size: int) -> int | None:
        """Return the number of batches that the dataset promises, or None if unknown."""
        return None if self.size is None else -(-self.size // batch_size)

    def shard(self, count: int, index: int) -> "SequentialSource":
        """Return one of `count` parts as a source. Raises UserError if the dataset has no such parts."""
        raise TypeError(f"{type(self).__name__} must define shard")


def divided(dataset: Any, count: int, index: int) -> Any:
    """Return the `index`-th of `count` parts of a dataset that has `shard(num_shards, index)`, as Hugging Face's do.

    Raises UserError if it has no such method, or has fewer parts.
    """
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        raise UserError(
            f"data.stream_shards: {type(dataset).__name__} has no method `shard`, wanted shard(num_shards, index), "
            "which returns the index-th of num_shards parts, as an IterableDataset that opens nothing of the others. "
            "Add it (datasets has it), or leave data.stream_shards out: each process reads all of it then"
        )
    most = getattr(dataset, "num_shards", None)
    if isinstance(most, int) and most < count:
        raise UserError(
            f"data.stream_shards: {count}, but the dataset consists of {most} (its num_shards, which are files as a "
            f"rule); take at most {most}, write it into more files, or divide it further (`reshard` of datasets)"
        )
    return shard(count, index)


class OrderedSource(ForeignSource):
    """Base class of map-style sources that define their own order.

    batch_size: the size of every batch except a shorter last one, None if it varies. constant: every epoch has the same
    number of batches. replays: an epoch's order depends on the epochs before it, which are drawn again to compute it.
    """

    batch_size: int | None = None
    constant: bool = False
    replays: bool = True

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} must define __len__")

    def position(self, key: Any) -> int:
        """Return the position for a key that the order yields."""
        return int(key)

    def begin(self) -> "BatchOrder":
        """Return the order from its first epoch, as if nothing had been drawn."""
        raise TypeError(f"{type(self).__name__} must define begin")

    def follow(self, order: "BatchOrder | None") -> bool:
        """Apply the user's changes to the sampler since the last check to `order` and to later ones. Return True if
        there were any."""
        return False


class BatchOrder(Protocol):
    """Batches of successive epochs. named: a name for the sampler, for messages."""

    named: str

    def epoch(self, number: int) -> Iterator[Sequence[Any]]:
        """Draw the next epoch's batches, over all processes: positions, or keys that `OrderedSource.position` accepts.

        number: the number of that epoch.
        """
        ...


def raised(error: BaseException, where: str, what: str = "the dataset") -> BaseException:
    """Return the exception to raise in place of `error`, with a readable message. A Ctrl-C is returned unchanged."""
    if _interrupted(error):
        return error
    if isinstance(error, UserError):  # its message already explains the problem
        return (DataError if isinstance(error, DataError) else UserError)(f"{error} ({where})")
    return DataError(f"{what} raised at {where}: {type(error).__name__}: {error}")


def _interrupted(error: BaseException) -> bool:
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and handled and threading.current_thread() is threading.main_thread()
