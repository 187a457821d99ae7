"""Updates whose loss cannot be one program: torch runs it, around the compiled modules."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.compiled_step.lazy_scalar import LazyScalar


class TorchUpdates:
    """Go on with a compiled step's weights, optimizer and count in torch. Call as the step is called.

    step: a CompiledStep, whose values are synced into torch's objects and whose waiting gradients become `grad`.
    """

    def __init__(self, step: Any):
        from torch_bridge import torch_step

        self.step, self.bridge = step, torch_step
        step.sync()
        torch_step.compile_forwards(step.weights.modules.values())
        self.parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
        self.set_gradients(step.grads)
        step.grads = {}

    def set_gradients(self, grads: Mapping[str, Any]) -> None:
        """Let these gradients wait for the next update."""
        self.bridge.set_gradients(self.step.weights.tensors, self.parameters, grads)

    def gradients(self) -> dict[str, Any]:
        """The gradients that wait for an update."""
        return self.bridge.gradients(self.step.weights.tensors, self.parameters)

    def __call__(self, batch: Any, update: bool | None) -> Any:
        step, weights = self.step, self.step.weights
        if weights.dirty:
            weights.sync()  # another update of these modules is a program
        updating = (step.count + 1) % step.accumulate == 0 if update is None else update
        divisor = step.accumulate if update is None else 1
        modules = list(weights.modules.values())
        lowered = step.precision.compute != step.precision.params
        loss, parts = self.bridge.backward(modules, step.loss_fn, batch, step.optimizer, divisor, lowered)
        step.count += 1
        step.grad_norm = None
        if updating:
            norm = self.bridge.update(step.optimizer, step.clip_norm)
            step.grad_norm = None if norm is None else LazyScalar(norm)
            if step.scheduler is not None:
                step.scheduler.step()
        step.parts = {name: LazyScalar(value) for name, value in parts.items()}
        return (LazyScalar(loss), step.parts) if parts else LazyScalar(loss)
