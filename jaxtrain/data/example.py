"""A few samples as they will come, before any training."""

from typing import Any

import jax
import numpy as np

from jaxtrain.data.loader import Loader
from jaxtrain.errors import DataError


def first_samples(loader: Loader, count: int = 2) -> dict[str, Any]:
    """Return the first samples of the first batch, in numpy: `count`, the last one again where the batch has fewer.

    The whole batch is read where the dataset's collate function takes no part of it: it may want pairs, or fill memory
    of a fixed size. Raises DataError where that fails too.
    """
    size = loader.stream.batch_size
    rows = np.minimum(np.arange(count), size - 1)
    try:
        return loader.host_batch(0, rows)
    except DataError:
        if size <= count:
            raise
    return jax.tree.map(lambda array: array[rows], loader.host_batch(0, np.arange(size)))
