"""Compiled forward pass in evaluation mode, with a step's newest weights."""

from typing import Any


class CompiledForward:
    """Forward pass of the module `name`; called like the module, it returns torch tensors without gradients.

    step: a CompiledStep, whose weights are written back before a call that follows an update. The module is captured as
    torch.compile captures it, in several programs if it has to be.
    """

    def __init__(self, step: Any, name: str):
        from torch_bridge.capture.module_call import ModuleCall

        self.step, self.module = step, step.weights.modules[name]
        self.generation = step.weights.generation
        self._call = ModuleCall(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch_bridge import torch_step

        weights = self.step.weights
        weights.refresh()
        self.generation = weights.generation  # the capture's guards see parameters and submodules that were replaced
        if self.step.ahead:
            self.step.sync()
        return torch_step.in_evaluation(self.module, self._call, args, kwargs)
