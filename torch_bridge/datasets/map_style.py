"""Sources for map-style torch Datasets."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from jaxtrain.errors import UserError
from torch_bridge.datasets.convert import to_numpy, to_torch
from torch_bridge.datasets.lengths import length_of
from torch_bridge.datasets.own_generators import generators_in
from torch_bridge.sources import ForeignSource


class TorchRandom:
    """torch's global CPU generator."""

    get = staticmethod(torch.default_generator.get_state)
    set = staticmethod(torch.default_generator.set_state)
    seed = staticmethod(torch.default_generator.manual_seed)
    same = staticmethod(torch.equal)


class TorchHooks(ForeignSource):
    """Provide what a torch dataset expects of the process that reads it."""

    dataset: Any

    def raw(self, index: int) -> Any:
        return self.dataset[index]

    def random_states(self) -> list:
        return [TorchRandom()]

    def enter_worker(self, worker: int, workers: int, seed: int) -> None:
        """Set up the process as torch's workers do: one thread, seeds, `get_worker_info`, the user's worker_init_fn."""
        torch.set_num_threads(1)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed)
        info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=self.dataset)
        torch_worker._worker_info = info
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)

    @contextlib.contextmanager
    def as_worker(self, workers: int) -> Iterator[None]:
        before = torch_worker._worker_info
        torch_worker._worker_info = torch_worker.WorkerInfo(id=0, num_workers=workers, seed=0, dataset=self.dataset)
        try:
            yield
        finally:
            torch_worker._worker_info = before

    def enter_thread(self) -> None:
        """Limit operations of this thread to one thread each, as in torch's workers and its pinning thread: a second
        OpenMP team beside the main thread's is several times slower. The main thread keeps its setting."""
        torch.set_num_threads(1)

    def unkept_generators(self) -> list[str]:
        parts = {"dataset": self.dataset, "collate_fn": getattr(self.collate, "function", None)}
        return [name for place, part in parts.items() for name in generators_in(part, place)]

    def reducers(self) -> dict:
        return {torch.Tensor: _reduce_tensor}


def _reduce_tensor(tensor: torch.Tensor):
    """Pickle a tensor as its numpy array, whose data workers share."""
    if tensor.device.type != "cpu":
        raise UserError(
            f"data.num_workers: the dataset holds a tensor on {tensor.device}, which worker processes cannot share; "
            "keep it on the CPU, or set data.num_workers=0"
        )
    if tensor.is_shared() and tensor.untyped_storage().filename is None:  # a tensor mapped from a file is allowed
        raise UserError(
            "data.num_workers: the dataset holds a tensor in shared memory (share_memory_()), of which each worker "
            "process would get a copy: to save memory leave share_memory_() out, as workers share the pages of large "
            "tensors anyway; to tell them a value change a plain attribute in a callback's on_epoch_end "
            "(docs/callbacks.md), or set data.num_workers=0"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.__reduce_ex__(2)
    return _restore_tensor, (np.ascontiguousarray(to_numpy(tensor)).reshape(tensor.shape), tensor.requires_grad)


def _restore_tensor(array: np.ndarray, requires_grad: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array) if array.dtype.kind != "V" else to_torch(array)
    return tensor.requires_grad_(requires_grad)


class TorchSource(TorchHooks):
    """A map-style torch Dataset whose items are converted to numpy."""

    def __init__(self, dataset: Any, worker_init_fn: Callable[[int], None] | None = None):
        if not hasattr(dataset, "__len__"):
            raise without_length(dataset)
        self.dataset, self._size = dataset, length_of(dataset)
        self.worker_init_fn = worker_init_fn

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return to_numpy(self.dataset[index])

    def converted(self, item: Any) -> Any:
        return to_numpy(item)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.dataset, epoch)
        check_length(self.dataset, self._size, epoch)

    def __getattr__(self, name: str) -> Any:
        """Provide `__getitems__`, which torch's own loader prefers, if the dataset has it."""
        if name == "__getitems__" and hasattr(self.__dict__.get("dataset"), name):
            return lambda indices: [to_numpy(item) for item in self.dataset.__getitems__(indices)]
        raise AttributeError(name)


def without_length(dataset: Any) -> UserError:
    """Return the error for a map-style Dataset without a length."""
    return UserError(f"{type(dataset).__name__} has no __len__; a map-style Dataset needs it, or make it iterable")


def set_epoch(value: Any, epoch: int) -> None:
    """Call `set_epoch` of a dataset or sampler if it has that method (DistributedSampler's protocol)."""
    if hasattr(value, "set_epoch"):
        value.set_epoch(epoch)


def check_length(dataset: Any, size: int, epoch: int) -> None:
    """Raise UserError if the dataset's length has changed since its order was made."""
    now = length_of(dataset)
    if now != size:
        raise UserError(
            f"len({type(dataset).__name__}) is {now} in epoch {epoch}, and was {size} before the run, by "
            "which its order and length were set: keep it constant, give your own sampler that draws each epoch's "
            "positions (its set_epoch is called), or start another run with the changed dataset"
        )
