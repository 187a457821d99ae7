"""A ring buffer of activations that lives on the device and is written inside the compiled step."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn


class RingBuffer(nnx.Module):
    """The last `size` rows written, [size, dim] float32, and where the next one goes.

    exact_fill_bug: the original's rule, by which writes that end exactly at the end leave the buffer looking empty
    until it wraps again; False marks it full.
    """

    def __init__(self, size: int, dim: int, exact_fill_bug: bool = False):
        self.rows = nn.Carry(jnp.zeros((size, dim)), stays_finite=True)  # add() is given finite rows only
        self.position = nn.Carry(jnp.zeros((), jnp.int32))
        self.full = nn.Carry(jnp.zeros((), bool))
        self.exact_fill_bug = exact_fill_bug

    @property
    def size(self) -> int:
        return self.rows.shape[0]

    def count(self):
        """int32 scalar: rows that can be read."""
        return jnp.where(self.full[...], self.size, self.position[...])

    def add(self, rows, valid=None) -> None:
        """Write rows [row, dim] (further axes are flattened to rows) where `valid` bool [row] is True, in order."""
        rows = jax.lax.stop_gradient(rows.reshape(-1, rows.shape[-1])).astype(jnp.float32)
        valid = jnp.ones(rows.shape[0], bool) if valid is None else valid
        size, start = self.size, self.position[...]
        number = valid.sum(dtype=jnp.int32)
        order = jnp.cumsum(valid, dtype=jnp.int32) - 1
        replaced = number >= size  # more than fits: only the last `size` stay, from the beginning of the storage
        place = jnp.where(replaced, order - (number - size), (start + order) % size)
        place = jnp.where(valid & (place >= 0), place, size)  # out of range: not written
        self.rows.set_value(self.rows[...].at[place].set(rows, mode="drop"))
        end = start + number
        wrapped = end > size if self.exact_fill_bug else end >= size
        self.full.set_value(self.full[...] | replaced | wrapped)
        self.position.set_value(jnp.where(replaced, 0, end % size))

    def sample(self, key, number: int):
        """[number, dim]: rows drawn evenly, with repetition, from those that can be read; zeros if none."""
        index = jax.random.randint(key, (number,), 0, jnp.maximum(self.count(), 1))
        return self.rows[...][index]
