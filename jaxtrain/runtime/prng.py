"""Random keys for one call of a model, and for its initial weights."""

import jax
from flax import nnx

from jaxtrain.runtime import threefry


def install() -> None:
    """Generate random bits by loop-free code in the programs that this process compiles for a CPU from now on.

    The bits are the same; runtime/threefry.py says what it saves. The Trainer calls this before it compiles.
    """
    threefry.install()


class Rngs:
    """A source of new random keys inside one traced call; passing `None` instead means evaluation mode.

    The counter is a Python int, so the n-th request of a trace always folds in n. So the same step with the same key
    draws the same dropout on any number of devices, and `jax.checkpoint` replays it.
    """

    def __init__(self, key: jax.Array):
        self._key = key
        self._count = 0

    def __call__(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)

    def fold(self, index: int | jax.Array) -> "Rngs":
        """Return an independent source, for the index-th layer of a scan or the index-th micro-batch."""
        return Rngs(jax.random.fold_in(self(), index))


def key_of(seed: int) -> jax.Array:
    """Return the key of a seed of up to 64 bits, all of which count; a negative one means the same bits, as in torch.

    Source: jax.random.key, which reads the lower 32 bits of a seed and drops the others.
    """
    bits = seed % 2**64
    key = jax.random.key(bits & 0x7FFFFFFF)
    return jax.random.fold_in(jax.random.fold_in(key, bits >> 31 & 1), bits >> 32) if bits >> 31 else key


def initial_rngs(seed: int | jax.Array) -> nnx.Rngs:
    """Return an equivalent of `nnx.Rngs(seed)`, with the same keys in the same order, for a model built inside a trace.

    At every draw flax compares the devices of the counter's old and new value. A traced value has none, and jax raises
    an error whose text searches all operations so far: the time grows with the square of the model's size. For the same
    reason a model writes its own variables with `variable.set_value(x)`, not `variable[...] = x`.
    """
    rngs = nnx.Rngs(seed)
    rngs.default = _Stream(rngs.default.key.get_value(), tag=rngs.default.tag)
    return rngs


class _Stream(nnx.RngStream):
    def __call__(self) -> jax.Array:
        count = self.count.get_raw_value()
        self.count.set_raw_value(count + 1)
        return jax.random.fold_in(self.key.get_raw_value(), count)
