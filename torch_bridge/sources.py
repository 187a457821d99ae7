"""The interface between a dataset of another library and `jaxtrain.data`. Needs no torch.

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
    """A map-style source that keeps the ways of another library; a base class.

    workers_wanted: worker processes that it asks for, where data.num_workers does not. start_method: how it wants them
    started, where it says so. persistent: they keep the dataset as it was when they started. collate: its own function
    of a list of items; None takes the task's. examples: items that were read for an example, by position, which the
    first epoch takes over. peek: reads examples where worker processes read the rest (jaxtrain.data.peek).
    worker_init_fn: of the user's, which a worker calls before it reads.
    """

    workers_wanted: int = 0
    start_method: str | None = None
    persistent: bool = False
    collate: Callable[[Sequence[Any]], Any] | None = None
    examples: Mapping[int, Any] = MappingProxyType({})
    peek: Any = None
    worker_init_fn: Callable[[int], None] | None = None

    def __getitem__(self, index: int) -> Any:
        raise TypeError(f"{type(self).__name__} gives no sample by its position")

    def raw(self, index: int) -> Any:
        """Return the sample at a position as the dataset gives it, tensors included."""
        return self[index]

    def random_states(self) -> list[RandomState]:
        """List further global generators that its items may draw from."""
        return []

    def enter_worker(self, worker: int, workers: int, seed: int) -> None:
        """Prepare a worker process; called once, before the first item."""

    def as_worker(self, workers: int) -> contextlib.AbstractContextManager:
        """Return a context in which this process looks to the dataset like the first of so many workers."""
        return contextlib.nullcontext()

    def enter_thread(self) -> None:
        """Prepare the thread that reads ahead, where there are no worker processes."""

    def shares_order(self, other: Any) -> bool:
        """Return whether reading `other` in its own library moves the order in which this source comes."""
        return False

    def interleave(self, other: Any, passes: Callable[[int], int]) -> None:
        """Follow a source with which `shares_order` is so. passes: how many passes over it lie between the beginnings
        of an epoch and of the one before."""
        raise NotImplementedError

    def unkept_generators(self) -> list[str]:
        """Name the random generators of the dataset's own that a resumed run begins anew."""
        return []

    def reducers(self) -> dict[type, Callable]:
        """Map types to functions that take their values apart for worker processes, as copyreg has them."""
        return {}


class SequentialSource(ForeignSource):
    """Samples that come one after another and cannot be asked for by position; a base class.

    workers: how many processes may share an epoch without changing it. size: samples in an epoch, None if unknown.
    batch_size: where the source decides. ready_made: every chunk is a whole batch already. tells_places: `place` and
    the argument of `chunks` are there. apart: worker processes read it, each from a copy. begun: a pass that was begun
    for an example, which the first epoch goes on with (jaxtrain.data.sample_reader).
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
        """Return where the pass stands after its last chunk, in values that JSON holds."""
        return None

    @property
    def replays(self) -> bool:
        """Return whether a resumed run reads the epochs before its own again: the stream holds random generators that
        nothing else brings to where they were."""
        told = self.tells_places or hasattr(getattr(self, "dataset", None), "set_epoch")
        return not told and bool(self.unkept_generators())

    def steps_per_epoch(self, batch_size: int) -> int | None:
        """Return the number of batches that the dataset promises, None if it does not say."""
        return None if self.size is None else -(-self.size // batch_size)

    def shard(self, count: int, index: int) -> "SequentialSource":
        """Return one of `count` parts, as a source of its own. Raises UserError where the dataset has no such parts."""
        raise TypeError(f"{type(self).__name__} must define shard")


def divided(dataset: Any, count: int, index: int) -> Any:
    """Return the `index`-th of `count` parts of a dataset that has `shard(num_shards, index)`, as Hugging Face's have.

    Raises UserError where it has not, or consists of fewer.
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
    """A map-style source with an order of its own; a base class.

    batch_size: the size of every batch but a shorter last one, None where it varies. constant: every epoch has as many
    batches. replays: an epoch's order depends on the epochs before it, which are drawn again to find it.
    """

    batch_size: int | None = None
    constant: bool = False
    replays: bool = True

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} must define __len__")

    def position(self, key: Any) -> int:
        """Return the position that stands for what the order gives."""
        return int(key)

    def begin(self) -> "BatchOrder":
        """Return the order from its first epoch on, as if nothing had been drawn."""
        raise TypeError(f"{type(self).__name__} must define begin")

    def follow(self, order: "BatchOrder | None") -> bool:
        """Take over into `order`, and into later ones, what the user has changed in the sampler since the last look.
        Return whether anything was."""
        return False


class BatchOrder(Protocol):
    """The batches of one epoch after another. named: what makes them, in words."""

    named: str

    def epoch(self, number: int) -> Iterator[Sequence[Any]]:
        """Draw the next epoch's batches, over all processes: positions, or keys that `OrderedSource.position` takes.

        number: which epoch it is.
        """
        ...


def raised(error: BaseException, where: str, what: str = "the dataset") -> BaseException:
    """Return the exception to raise instead, the error in words. A Ctrl-C stays one."""
    if _interrupted(error):
        return error
    if isinstance(error, UserError):  # says itself what is wrong
        return (DataError if isinstance(error, DataError) else UserError)(f"{error} ({where})")
    return DataError(f"{what} raised at {where}: {type(error).__name__}: {error}")


def _interrupted(error: BaseException) -> bool:
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and handled and threading.current_thread() is threading.main_thread()
