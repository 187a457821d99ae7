"""Batches of fewer samples than data.batch_size, in their true shape."""

from typing import Any

import jax
import numpy as np

from jaxtrain.runtime.mesh import Layout, local_rows


class ShortBatches:
    """Cuts a short batch as a torch DataLoader of micro-batches would: whole micro-batches, and a rest.

    micro: samples of a whole micro-batch over all processes. A rest that does not divide over the devices is held, and
    computed, by each of them.
    """

    def __init__(self, layout: Layout, micro: int):
        self.layout, self.micro = layout, micro

    def rows(self, size: int) -> np.ndarray:
        """Which rows of a batch of `size` samples this process reads."""
        whole, rest = divmod(size, self.micro)
        parts = [i * self.micro + local_rows(self.micro, self.layout) for i in range(whole)]
        return np.concatenate([*parts, whole * self.micro + local_rows(rest, self.layout)] if rest else parts)

    def place(self, batch: dict, size: int) -> Any:
        """Global arrays [micro-batch, sample, ...] of those rows: one dict, or two where the rest is smaller."""
        whole, rest = divmod(size, self.micro)
        cut = whole * len(local_rows(self.micro, self.layout))
        parts = []
        if whole:
            parts.append(self._put(jax.tree.map(lambda leaf: leaf[:cut], batch), whole, self.micro))
        if rest:
            parts.append(self._put(jax.tree.map(lambda leaf: leaf[cut:], batch), 1, rest))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _put(self, rows: dict, count: int, size: int) -> dict[str, jax.Array]:
        return put([rows], count, size, self.layout)


def put(batches: list[dict], count: int, size: int, layout: Layout) -> dict[str, jax.Array]:
    """Host rows of consecutive batches -> global arrays [step if several, micro-batch, sample, ...]; size: samples of
    each of `count` micro-batches over all processes."""
    sharding = layout.rows(size, leading=1 if len(batches) == 1 else 2)
    alone = jax.process_count() == 1

    def place(*rows: np.ndarray) -> Any:
        parts = [row.reshape(count, -1, *row.shape[1:]) for row in rows]
        local = parts[0] if len(parts) == 1 else np.stack(parts)
        axis = local.ndim - rows[0].ndim
        shape = (*local.shape[:axis], size, *local.shape[axis + 1 :])
        return local if alone else jax.make_array_from_process_local_data(sharding, local, shape)

    placed = jax.tree.map(place, *batches)
    return jax.device_put(placed, sharding) if alone else placed  # at once: a transfer each would cost more
