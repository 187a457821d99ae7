"""Read a few samples before training, as the run will see them."""

from typing import Any

import jax
import numpy as np

from jaxtrain.data.loader import Loader
from jaxtrain.errors import DataError


def first_samples(loader: Loader, count: int = 2) -> dict[str, Any]:
    """Return the first `count` samples of the first batch, in numpy; a smaller batch repeats its last sample.

    Reads the whole batch if the dataset's collate function fails on a part of it: it may need pairs, or fill memory of
    a fixed size. Raises DataError if that fails too.
    """
    size = loader.stream.batch_size
    rows = np.minimum(np.arange(count), size - 1)
    try:
        return loader.host_batch(0, rows)
    except DataError:
        if size <= count:
            raise
    return jax.tree.map(lambda array: array[rows], loader.host_batch(0, np.arange(size)))
