"""Containers whose children have torch's numeric keys."""

import inspect

from flax import nnx


class Sequential(nnx.List):
    """Calls modules (or plain functions wrapped as modules) in sequence; keys are "0", "1", ...

    Source: torch.nn.Sequential. `rngs` is passed to the children that take it.
    """

    def __init__(self, *modules):
        super().__init__(list(modules))

    def __call__(self, x, rngs=None):
        for module in self:
            x = module(x, rngs=rngs) if "rngs" in inspect.signature(module.__call__).parameters else module(x)
        return x


class Activation(nnx.Module):
    """A function as a module for Sequential, where it takes up an index; it has no parameters."""

    def __init__(self, function):
        self.function = function

    def __call__(self, x, rngs=None):
        return self.function(x)
