"""Containers whose children carry torch's numeric keys."""

import inspect

from flax import nnx


class Sequential(nnx.List):
    """Call the modules (or plain functions wrapped as modules) one after another; keys are "0", "1", ...

    Source: torch.nn.Sequential. `rngs` is passed to the children that take it.
    """

    def __init__(self, *modules):
        super().__init__(list(modules))

    def __call__(self, x, rngs=None):
        for module in self:
            x = module(x, rngs=rngs) if "rngs" in inspect.signature(module.__call__).parameters else module(x)
        return x


class Activation(nnx.Module):
    """A function in a Sequential: takes a number there, has no parameters."""

    def __init__(self, function):
        self.function = function

    def __call__(self, x, rngs=None):
        return self.function(x)
