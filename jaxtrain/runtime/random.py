"""Random keys for one call of a model."""

import jax

from jaxtrain.runtime import threefry

threefry.install()


class Rngs:
    """A source of fresh keys inside one traced call; `None` in its place means evaluation mode.

    The counter is a Python number, so the n-th request of a trace always folds in n: the same step with the same key
    draws the same dropout, on any number of devices, and `jax.checkpoint` replays it.
    """

    def __init__(self, key: jax.Array):
        self._key = key
        self._count = 0

    def __call__(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)

    def fold(self, index: int | jax.Array) -> "Rngs":
        """An independent source, for the index-th layer of a scan or the index-th micro-batch."""
        return Rngs(jax.random.fold_in(self(), index))
