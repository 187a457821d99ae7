"""Which rows train, which validate, which test."""

import numpy as np


def split_rows(
    rows: int, fraction: float = 1.0, seed: int | None = None, validation_size: float = 0.1, test_size: float = 0.2
) -> dict[str, np.ndarray]:
    """Row positions by split: a shuffled `fraction` of the rows, cut into contiguous pieces.

    Equals pandas' DataFrame.sample(frac, random_state=seed) followed by the original's slices; the test split takes
    what rounding leaves.
    """
    count = round(fraction * rows)
    order = np.random.RandomState(seed).choice(rows, size=count, replace=False)
    train, validation = int(count * (1 - validation_size - test_size)), int(count * validation_size)
    pieces = np.split(order, [train, train + validation])
    return dict(zip(("train", "validation", "test"), pieces, strict=True))


def distributed_indices(size: int, world: int, rank: int, epoch: int = 0, shuffle: bool = True, seed: int = 0) -> list:
    """What torch's DistributedSampler gives a rank (without shuffling: no random numbers of torch's are needed).

    The trainer itself slices one global order over its processes instead (jaxtrain.data.index_stream).
    """
    order = list(range(size))
    total = -(-size // world) * world
    repeated = (order * (total // max(1, size) + 1))[:total]
    return repeated[rank:total:world]
