"""Refresh the copies that a run holds of its data, after the user's callbacks have changed the data."""

from typing import Any

from jaxtrain.data.index_stream import SamplerStream
from jaxtrain.data.sources import ArraySource
from jaxtrain.errors import UserError
from jaxtrain.train.program import Program
from jaxtrain.train.resume import object_digest


class LiveData:
    """Copies of the data that a run refreshes: columns on the devices, copies in worker processes, a sampler's order.

    Everything else is read directly from the dataset.
    """

    def __init__(self, program: Program):
        self.program = program
        self._seen = {split: self._state(split) for split in ("train", "validation")}

    def follow(self, split: str, step: int = 0) -> bool:
        """Refresh what has changed in a split since the last call, for the batches from `step` on. Return True if its
        columns were read again. Raises UserError if their length has changed."""
        data = self.program.data
        if split == "train" and isinstance(data.train_loader.stream, SamplerStream):
            data.train_loader.stream.follow(step)
        now = self._state(split)
        if now == self._seen[split]:
            return False
        self._seen[split] = now
        source = data.source(split)
        if data.in_workers(split):
            data.restart_workers(split)
        if not isinstance(source, ArraySource) or source.given is None:
            return False
        size = len(source)
        source.take(source.given)
        if len(source) != size:
            raise UserError(
                f"the {split} data had {size} samples as the run began, by which its length was set, and a callback "
                f"has made {len(source)} of them: keep their number, or end the run here and start another"
            )
        return True

    def _state(self, split: str) -> Any:
        """Return a digest of the data of a split that the run has copied; None if it has copied none."""
        data = self.program.data
        source = data.source(split)
        if isinstance(source, ArraySource):
            return source.checksums()
        if not data.in_workers(split):
            return None
        return object_digest.describe([getattr(source, "dataset", source), getattr(source, "collate", None)])
