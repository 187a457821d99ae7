"""A compiled step that counts only where it is finite: for code of which torch may raise for some values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class OnlyFinite:
    """Run a step (arrays, optimizer's state, gradients, ...) -> (those anew, (loss, ...)); give the state back as it
    was where it makes the loss or anything of the state infinite or NaN, and set `failed`. It waits for the result.

    sums: the step adds to the gradients, and does not use them up.
    """

    def __init__(self, step: Callable, sums: bool):
        self.failed = False
        self._sums = sums
        self._compiled = jax.jit(_kept(step), donate_argnums=(0, 1, 2))

    def __call__(self, arrays: dict, opt_state: Any, grads: dict, *rest: Any) -> tuple:
        before = set(grads)
        (arrays, opt_state, grads), found, fine = self._compiled(arrays, opt_state, grads, *rest)
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
    """Tell whether nothing is infinite or NaN that was not."""
    return jnp.all(jnp.isfinite(now) | ~jnp.isfinite(was))
