"""Label the operations of a compiled program with the module of the model that they come from.

XLA keeps the names as metadata, so numbers and compiled code are the same with and without them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

ATTENTION = "scaled_dot_product_attention"  # the name for every kernel
OPTIMIZER = "optimizer"

opened: set[str] = set()  # every name used in this process, to distinguish them from XLA's own names


def scope(name: str) -> Any:
    """Return a context that names the operations traced in it."""
    opened.add(name)
    return jax.named_scope(name)


def within(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that gives a function's operations this name."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def named_call(*args, **kwargs):
            with scope(name):
                return function(*args, **kwargs)

        return named_call

    return decorate


def named(call: Callable) -> Callable:
    """Decorate the `__call__` of a layer, so that its operations are named by the layer's path in the model.

    The path comes from the metadata of the layer's variables, set by ModelDef. Outside a run a layer has no path, and
    its operations no name.
    """

    @functools.wraps(call)
    def named_call(self, *args, **kwargs):
        path = _path(self)
        if not path:
            return call(self, *args, **kwargs)
        with scope(path):
            return call(self, *args, **kwargs)

    return named_call


def _path(layer: nnx.Module) -> str:
    """Return a layer's path: from its own variables, else the path of its first submodule; "" if unknown."""
    parts = list(vars(layer).values())
    keys = [part.get_metadata("key", "") for part in parts if isinstance(part, nnx.Variable)]
    keys += [_path(part) for part in parts if isinstance(part, nnx.Module)]
    return next((key.rpartition(".")[0] for key in keys if key), "")
