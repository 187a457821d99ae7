"""A compiled step that is undone if its result is not finite, for code on which torch may raise for some values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class OnlyFinite:
    """A step that returns the old state, and sets `failed`, if the loss or the new state is infinite or NaN.

    step: to be compiled; the given one, (arrays, optimizer state, gradients, ...) -> (the new ones, (loss, ...)), with
    a check of its result. sums: it adds to the gradients instead of using them up. Each call waits for the result.
    """

    def __init__(self, step: Callable, sums: bool):
        self.failed = False
        self._sums = sums
        self.step = _kept(step)

    def __call__(self, compiled: Callable, arrays: dict, opt_state: Any, grads: dict, *rest: Any) -> tuple:
        """Call the compiled `step`; return the new state and (loss, ...)."""
        before = set(grads)
        (arrays, opt_state, grads), found, fine = compiled(arrays, opt_state, grads, *rest)
        self.failed = not fine
        if self.failed or not self._sums:
            grads = {name: value for name, value in grads.items() if self.failed and name in before}
        return (arrays, opt_state, grads), found


def _kept(step: Callable) -> Callable:
    def run(arrays, opt_state, grads, *rest):
        (new, after, sums), found = step(arrays, opt_state, grads, *rest)
        sums = {name: sums.get(name, grads.get(name)) for name in {**grads, **sums}}
        before = {name: grads[name] if name in grads else jnp.zeros_like(value) for name, value in sums.items()}
        states = (new, after, sums), ({name: arrays[name] for name in new}, opt_state, before)
        fine = jnp.isfinite(found[0]) & jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(_as_finite, *states))))
        return jax.tree.map(lambda now, was: jnp.where(fine, now, was), *states), found, fine

    return run


def _as_finite(now: jax.Array, was: jax.Array) -> jax.Array:
    """Return True if every element is finite, except those that were not finite before."""
    return jnp.all(jnp.isfinite(now) | ~jnp.isfinite(was))
