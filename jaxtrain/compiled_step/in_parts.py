"""Forward, backward and update that a torch loop calls one by one, over all devices, with one device's results."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.compiled_step.shared_weights import SharedWeights
from jaxtrain.compiled_step.step import CompiledStep
from jaxtrain.config import ShardConfig
from jaxtrain.errors import UserError
from jaxtrain.optim.torch_optimizer import UpdateInTorch
from jaxtrain.runtime import compile_cache, gpus, host_memory, jax_settings
from jaxtrain.runtime.mesh import make_layout
from jaxtrain.runtime.precision import POLICIES

log = logging.getLogger(__name__)


class StepInParts:
    """Modules whose calls compute over all devices, and the updates of their optimizers.

    modules: torch modules by name; their weights, gradients and moments are split as `shard` says, a strategy of
    `jaxtrain.compile`. From now on `module(...)` runs compiled.
    """

    def __init__(self, modules: Mapping[str, Any], shard: str):
        from torch_bridge.capture.sharded_graph import compile_sharded
        from torch_bridge.device_tensor import DeviceTensor

        jax_settings.check()
        gpus.share_memory()
        compile_cache.enable()
        host_memory.keep()
        self.weights = SharedWeights(modules, make_layout(ShardConfig.model_validate({"strategy": shard})), None)
        self._steps: dict[int, CompiledStep] = {}  # by the optimizer's id
        self._on_devices = DeviceTensor
        compile_sharded(self.weights.given.values(), self.weights)

    def holds(self, optimizer: Any) -> bool:
        """Return True if the optimizer updates a parameter of these modules."""
        return any(id(p) in self.weights.names for group in optimizer.param_groups for p in group["params"])

    def update(self, optimizer: Any) -> bool:
        """Update the weights with the gradients in `grad`, as `optimizer.step()` does. Return False if torch has to
        step an optimizer without a rule here; the weights are then torch's."""
        weights, step = self.weights, self._step_of(optimizer)
        if isinstance(step.updates, UpdateInTorch):
            weights.sync()
            return False
        with weights.exchange.plainly():
            step.refresh()
            held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
            grads = {weights.names[key]: parameter.grad for key, parameter in held.items()}
        if not grads:
            step.after_call([])
            return True
        mine = {name: grad.array for name, grad in grads.items() if isinstance(grad, self._on_devices)}
        others = {name: np.asarray(weights.exchange.to_array(grad)) for name, grad in grads.items() if name not in mine}
        state = weights.arrays, step.opt_state, mine | weights.placed(others), step.updates.numbers(), None
        with weights.exchange.products():
            (weights.arrays, step.opt_state, step.grads), _ = step.update_program(1)(*state)
        weights.move_ahead()
        step.after_call(list(grads))
        return True

    def _step_of(self, optimizer: Any) -> CompiledStep:
        step = self._steps.get(id(optimizer))
        if step is None or step.optimizer is not optimizer:
            step = CompiledStep(
                len(self._steps),
                self.weights,
                _no_loss,
                optimizer,
                None,
                1,
                POLICIES["fp32"],
                clip_norm=None,
                wait=True,
            )
            if isinstance(step.updates, UpdateInTorch):
                log.warning("%s: torch updates the weights, whole on one device", step.updates.reason)
            self._steps[id(optimizer)] = step
        return step


def _no_loss(module: Any, batch: Any) -> Any:
    raise UserError("the loop computes its loss itself")
