"""Names on the operations of a compiled program: the module of the model that they come from.

XLA keeps them as metadata, so numbers and compiled code are the same with and without.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

ATTENTION = "scaled_dot_product_attention"  # what belongs to it, whichever kernel it runs on
OPTIMIZER = "optimizer"

opened: set[str] = set()  # every name that was given in this process: it tells them from XLA's own


def scope(name: str) -> Any:
    """Name the operations that are traced within it, as a context manager."""
    opened.add(name)
    return jax.named_scope(name)


def within(name: str) -> Callable[[Callable], Callable]:
    """Decorate a function whose operations are to have this name."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def named_call(*args, **kwargs):
            with scope(name):
                return function(*args, **kwargs)

        return named_call

    return decorate


def named(call: Callable) -> Callable:
    """Decorate the `__call__` of a layer: its operations get the layer's path in the model, which its variables know
    (ModelDef marks them). A layer outside of a run has no path, and no name."""

    @functools.wraps(call)
    def named_call(self, *args, **kwargs):
        path = _path(self)
        if not path:
            return call(self, *args, **kwargs)
        with scope(path):
            return call(self, *args, **kwargs)

    return named_call


def _path(layer: nnx.Module) -> str:
    """Of one with variables of its own their place, of another the place of its first part."""
    parts = list(vars(layer).values())
    keys = [part.get_metadata("key", "") for part in parts if isinstance(part, nnx.Variable)]
    keys += [_path(part) for part in parts if isinstance(part, nnx.Module)]
    return next((key.rpartition(".")[0] for key in keys if key), "")
