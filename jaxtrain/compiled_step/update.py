"""The update inside a compiled step: clip the gradients, move the parameters and the optimizer's state."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.compiled_step.shared_weights import Arrays
from jaxtrain.optim.optimizer import clip, global_norm


def update(step: Any, divisor: int, arrays: Arrays, opt_state: Any, grads: Arrays, numbers: Any, limit: Any) -> tuple:
    """Clip the gradients and update the parameters that have one; return the new state and the norm. Traced."""
    if divisor > 1:
        grads = {name: value / divisor for name, value in grads.items()}
    grads, norm = step.weights.scattered(grads), None
    if limit is not None:
        names = step.clipped_names()
        counted = grads if names is None else {name: value for name, value in grads.items() if name in names}
        norm = global_norm(counted)
        grads = grads | clip(counted, norm, limit)
    moved = {name: arrays[name] for name in step.updates.keys if name in grads}
    params, opt_state = step.updates.compiled(list(moved))(grads, opt_state, moved, numbers)
    return (*step.weights.constrained(arrays | params, opt_state), {}), norm


def compile_update(step: Any, divisor: int) -> Callable:
    """Compile the update alone, for gradients that other programs have computed."""
    return jax.jit(functools.partial(update, step, divisor), donate_argnums=(0, 1))
