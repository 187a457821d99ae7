"""Place batches of fewer samples than data.batch_size in their true shape."""

from typing import Any

import jax
import numpy as np

from jaxtrain.data import row_keys
from jaxtrain.errors import UserError
from jaxtrain.runtime.mesh import Layout, local_rows


class ShortBatches:
    """Division of a short batch as by a torch DataLoader of micro-batches: into whole micro-batches and a rest.

    micro: samples of a whole micro-batch over all processes. A rest that the devices cannot divide is held, and
    computed, by each of them.
    """

    def __init__(self, layout: Layout, micro: int):
        self.layout, self.micro = layout, micro

    def rows(self, size: int) -> np.ndarray:
        """Return the rows of a batch of `size` samples that this process reads."""
        whole, rest = divmod(size, self.micro)
        parts = [i * self.micro + local_rows(self.micro, self.layout) for i in range(whole)]
        return np.concatenate([*parts, whole * self.micro + local_rows(rest, self.layout)] if rest else parts)

    def place(self, batch: dict, size: int) -> Any:
        """Return global arrays [micro-batch, sample, ...] of these rows: one dict, or two if the rest is smaller."""
        whole, rest = divmod(size, self.micro)
        if not (whole and rest):
            return self._put(batch, max(whole, 1), rest or self.micro)
        cut = whole * len(local_rows(self.micro, self.layout))
        first = self._put(jax.tree.map(lambda leaf: leaf[:cut], batch), whole, self.micro)
        return first, self._put(jax.tree.map(lambda leaf: leaf[cut:], batch), 1, rest)

    def _put(self, rows: dict, count: int, size: int) -> dict[str, jax.Array]:
        return put([rows], count, size, self.layout)


def put(batches: list[dict], count: int, size: int, layout: Layout) -> dict[str, jax.Array]:
    """Place host rows of consecutive batches as global arrays [step if several, micro-batch, sample, ...]. size:
    samples of each of `count` micro-batches over all processes.

    An entry with another number of rows (edges of a batch of graphs, a mask that all samples share) is held whole by
    every device. Raises UserError if such a batch would have to be cut.
    """
    sharding = layout.rows(size, leading=1 if len(batches) == 1 else 2)
    alone = jax.process_count() == 1
    samples = len(row_keys.valid(batches[0]))  # of this process
    whole = lambda row: row.ndim == 0 or len(row) != samples
    cut = not alone or count > 1 or layout.per_device

    def place(path: Any, *rows: np.ndarray) -> Any:
        if whole(rows[0]) and cut:
            raise cannot_cut(path, rows[0].shape, samples)
        parts = [row[None] if whole(row) else row.reshape(count, -1, *row.shape[1:]) for row in rows]
        local = parts[0] if len(parts) == 1 else np.stack(parts)
        axis = local.ndim - rows[0].ndim
        shape = (*local.shape[:axis], size, *local.shape[axis + 1 :])
        return local if alone else jax.make_array_from_process_local_data(sharding, local, shape)

    placed = jax.tree_util.tree_map_with_path(place, *batches)
    if not alone:
        return placed
    where = jax.tree.map(lambda row: layout.replicated if whole(row) else sharding, batches[0])
    return jax.device_put(placed, where)  # all at once: one transfer per array would cost more


def cannot_cut(path: Any, shape: tuple[int, ...], samples: int) -> UserError:
    """Return the error for a batch that has to be cut, naming the entry that cannot be."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return UserError(
        f"the collate function gives `{name}` the shape {list(shape)} for {samples} samples: a batch is cut by its "
        "first axis for train.accumulate_steps, shard.strategy=ddp_local and several processes, so that has to be "
        "the sample's in every entry. Leave these off, give every sample a row, or write the loop yourself with "
        "jaxtrain.compile, which takes batches as they are"
    )
