"""Draw the order of a DataLoader's sampler as torch does, and apply the user's changes to it between epochs."""

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import data

from jaxtrain.errors import UserError
from torch_bridge.datasets.convert import in_host_memory
from torch_bridge.datasets.map_style import set_epoch


class SamplerOrder:
    """Order of a DataLoader's sampler, epoch by epoch, drawn as torch draws it.

    A sampler may hold generators, counters and pools, so it is copied as a whole before its first draw. Every pass
    starts from such a copy, and the user's own object is not changed. The dataset is not copied.
    """

    def __init__(self, loader: data.DataLoader, sampler: Any):
        self._dataset, self._workers = loader.dataset, loader.num_workers
        self._persistent = loader.persistent_workers
        self._live: tuple[Any, ...] = (sampler, loader.generator)
        self._beside: SamplerOrder | None = None
        self._passes: Callable[[int], int] = lambda number: 0
        self._passed = False
        self.named = type(sampler.sampler if type(sampler) is data.BatchSampler else sampler).__name__
        self._parts = self._copied(self._live)
        self._seen: dict[tuple[int, str | None], bytes | None] | None = None

    @property
    def _shared(self) -> dict[int, Any]:
        """Return the dataset and the values of its attributes, by id."""
        kept = (self._dataset, *getattr(self._dataset, "__dict__", {}).values())
        others = {} if self._beside is None else self._beside._shared
        return others | {id(value): value for value in kept}

    def _copied(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            return copy.deepcopy(parts, self._shared)  # used as deepcopy's memo, so that these are not copied
        except (TypeError, ValueError, RuntimeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"the DataLoader's {type(parts[0]).__name__} cannot be copied ({type(error).__name__}: {error}), so a "
                "run could not resume at its place; let it hold plain values, and make iterators in its __iter__"
            ) from None

    def interleave(self, other: "SamplerOrder", passes: Callable[[int], int]) -> None:
        """Draw passes of another loader, which shares a generator, between the epochs. passes: epoch number -> how many
        passes lie between the starts of the previous epoch and this one."""
        self._passes = passes
        if self._beside is not other:
            self._beside, self._live = other, (*self._live[:2], *other._live[:2])
            self._parts = self._copied(self._live)

    def fresh(self) -> "SamplerOrder":
        """Return a copy of the order, at its beginning."""
        other = copy.copy(self)
        other._parts = self._copied(self._parts)
        return other

    def follow(self, others: Iterable["SamplerOrder"]) -> bool:
        """Apply the user's changes to the sampler and generators since the last check to this order and to `others`,
        which were started from it. Return True if there were any."""
        now, seen = self._contents(self._live), self._seen or self._contents(self._parts)
        changed = [key for key, content in now.items() if content != seen.get(key)]
        self._seen = now
        for order in (self, *others) if changed else ():
            copied = order._copied(self._live)
            for owner, name in changed:
                live = _owners(copied)[owner]
                value = live if name is None else getattr(live, name)
                own = _owners(order._parts)[owner]
                if name is not None and not isinstance(value, torch.Generator):
                    setattr(own, name, value)
                elif order is not self:  # only orders already begun: earlier epochs must be drawn again as before
                    (own if name is None else getattr(own, name)).set_state(value.get_state())
        return bool(changed)

    def _contents(self, parts: tuple[Any, ...]) -> dict[tuple[int, str | None], bytes | None]:
        """Return digests of the attributes of the sampler, of the sampler inside it, and of the loader's generator."""
        owners, shared = _owners(parts), self._shared
        found: dict[tuple[int, str | None], bytes | None] = {}
        for number, owner in enumerate(owners):
            if isinstance(owner, torch.Generator):
                found[number, None] = _content(owner, {})
            for name, value in getattr(owner, "__dict__", {}).items():
                if not (hasattr(value, "__dict__") and any(value is other for other in owners)):
                    found[number, name] = _content(value, shared)
        return found

    def epoch(self, number: int) -> Iterator[Any]:
        """Draw the next epoch, the `number`-th. The caller must seed torch's global generator.

        Source: torch.utils.data.dataloader._BaseDataLoaderIter.
        """
        sampler, generator = self._parts[:2]
        if self._beside is not None and number:
            self._pass_by(self._beside, self._passes(number))
        for part in (sampler, getattr(sampler, "sampler", None)):
            set_epoch(part, number)
        keeps_seed = self._persistent and number > 0  # persistent workers keep their iterator, and with it their seed
        return _begun(sampler, generator, self._workers, keeps_seed)

    def _pass_by(self, other: "SamplerOrder", times: int) -> None:
        """Draw whole passes of the other loader; leave torch's global generator unchanged."""
        sampler, generator = self._parts[2:]
        state = torch.get_rng_state()
        for _ in range(times):
            keeps_seed, self._passed = other._persistent and self._passed, True
            for _ in _begun(sampler, generator, other._workers, keeps_seed):
                pass
        torch.set_rng_state(state)


def _begun(sampler: Any, generator: torch.Generator | None, workers: int, keeps_seed: bool) -> Iterator[Any]:
    """Start a pass as torch's loader does."""
    drawn = iter(sampler)
    if not keeps_seed:
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # the seed of torch's workers
        if workers:
            drawn = iter(sampler)  # torch starts the sampler twice when it has workers
    return drawn


def _owners(parts: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return the batch sampler, the sampler inside it and the loader's generator; the last two may be None."""
    sampler, generator = parts[:2]
    return sampler, getattr(sampler, "sampler", None), generator


class _Pickler(pickle.Pickler):
    """Pickle values by content alone. shared: objects by id that are compared by identity."""

    def __init__(self, file: io.BytesIO, shared: Mapping[int, Any]):
        super().__init__(file, protocol=5)
        self._shared = shared

    def persistent_id(self, value: Any) -> Any:
        return id(value) if id(value) in self._shared else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return bytes, (in_host_memory(value).tobytes(),)
        if isinstance(value, torch.Generator):
            return bytes, (value.get_state().numpy().tobytes(),)
        return NotImplemented


def _content(value: Any, shared: Mapping[int, Any]) -> bytes | None:
    """Return a digest of a value's content; None if it cannot be pickled, such as an iterator."""
    file = io.BytesIO()
    try:
        _Pickler(file, shared).dump(value)
    except Exception:  # pickling a user's object may raise anything
        return None
    return hashlib.sha256(file.getvalue()).digest()
