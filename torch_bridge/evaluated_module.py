"""The module that `step.eval()` returns: the user's in evaluation mode, computed by a compiled forward pass."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge import torch_step

CONTAINERS = ("__len__", "__getitem__", "__iter__", "__reversed__", "__contains__")  # of a Sequential, say


class EvaluatedModule(torch.nn.Module):
    """A torch module's compiled forward pass in evaluation mode, with the module's attributes and methods.

    It can be passed to code that takes a module: `parameters()`, `state_dict()`, `to(device)`, `config` and the
    module's own methods are the module's, with the newest weights. A call returns tensors without gradients. `eval()`
    leaves the module's own mode alone, so training goes on as before; `train()` sets it, as torch does, and until the
    next `eval()` calls run in torch, in training mode and with gradients.
    """

    def __new__(cls, module: torch.nn.Module, forward: Callable[..., Any]) -> "EvaluatedModule":
        asked = [name for name in CONTAINERS if hasattr(type(module), name)]  # Python looks for these in the class
        kind: Any = type(cls.__name__, (cls,), {name: _handed_on(name) for name in asked}) if asked else cls
        return super().__new__(kind)

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]):
        vars(self).update(_module=module, _forward=forward, _evaluating=True)  # no tensors, hooks or mode of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its arguments. Raises torch's own error for inputs that torch cannot take either."""
        return self._forward(*args, **kwargs) if self._evaluating else self._module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    @property
    def training(self) -> bool:
        return not self._evaluating

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_evaluating"] = not mode

    def train(self, mode: bool = True) -> "EvaluatedModule":
        """Set the mode of calls; mode=True also sets the module to training mode. Returns self."""
        self.training = mode
        if mode:
            self._module.train()
        return self

    def eval(self) -> "EvaluatedModule":
        """Let calls evaluate again, compiled. Returns self."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute. Its methods evaluate in evaluation mode, in torch."""
        value = getattr(vars(self)["_module"], name)
        if not self._evaluating or getattr(value, "__self__", None) is not self._module:
            return value
        return lambda *args, **kwargs: torch_step.in_evaluation(self._module, value, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            object.__setattr__(self, name, value)
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return dir(self._module)

    def __repr__(self) -> str:
        return repr(self._module)

    def __deepcopy__(self, memo: dict) -> torch.nn.Module:
        return copy.deepcopy(self._module, memo).eval()

    def __reduce__(self) -> tuple:
        return copy.copy, (self._module,)  # a pickle holds the plain module


def _handed_on(name: str) -> Callable[..., Any]:
    """Return torch.nn.Module's method `name`, called on the user's module; where that returns itself, self."""

    def method(self: EvaluatedModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._module, name)(*args, **kwargs)
        return self if result is self._module else result

    method.__name__ = method.__qualname__ = name
    method.__doc__ = getattr(getattr(torch.nn.Module, name, None), "__doc__", None)
    return method


for _name, _value in vars(torch.nn.Module).items():
    if callable(_value) and not _name.startswith("__") and _name not in vars(EvaluatedModule):
        setattr(EvaluatedModule, _name, _handed_on(_name))
