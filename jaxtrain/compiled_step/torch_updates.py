"""Updates whose loss cannot be one program: torch runs the loss, around the compiled modules."""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.optim.torch_optimizer import UpdateInTorch

log = logging.getLogger(__name__)


def take_over(step: Any, batch: Any, update: bool | None, refused: UserError) -> Any:
    """Run this step in torch, and return its result; the next is captured anew. If the step before was refused too,
    all later ones run in torch, as `step.torch`, and a warning says why.

    Raises torch's own error if batch, module or loss are at fault; the next batch is then compiled as before. refused:
    why the step is not compiled.
    """
    reason = step.weights.bridge.reason_of(refused)
    waiting = step.grads
    updates = TorchUpdates(step)
    alone = updates.may_hand_back() and step.refusals.again(refused)
    stays = step.shapes.endless or step.weights.bridge.stays_in_torch(refused)
    ahead = not (updates.may_hand_back() or stays)
    if ahead:
        updates.compile_forwards()
    differentiated = step.weights.bridge.Differentiated(batch)
    began = time.perf_counter()
    try:
        with step.look.watching():
            found = updates(batch, update)
    except Exception:  # a mistake of the user's, for which nothing is given up
        updates.set_gradients({})
        step.grads, step.capture.refused = waiting, None
        step.refusals.recorded()
        raise
    step.torch_s = time.perf_counter() - began
    step.differentiated |= differentiated.numbers()
    once = isinstance(refused, step.weights.bridge.errors.RunsOnceInTorch)
    foreseen = step.look.refusal
    if alone and not foreseen and updates.hand_back(anew=not once):
        if once:
            step.refusals.recorded()
        log.info("this step runs in torch: %s%s", reason, "" if once else "; the next is captured anew")
        return found
    reason = foreseen or reason
    step.torch, updates.reason = updates, reason
    if stays:
        log.warning("%s; torch runs the steps from here on", reason)
    else:
        log.warning("%s: forward and backward of the modules run compiled, the loss and updates in torch", reason)
        updates.compile_forwards()
    return found


class TorchUpdates:
    """Continuation of a compiled step in torch, with its weights, optimizer and count. Called as the step is called.

    step: a CompiledStep. Its values are synced into torch's objects; its waiting gradients become `grad`. reason: why
    torch runs the steps.
    """

    def __init__(self, step: Any):
        from torch_bridge import torch_step

        self.step, self.bridge, self.reason = step, torch_step, ""
        step.sync()
        self.parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
        self.set_gradients(step.grads)
        step.grads = {}
        self._evaluates = torch_step.wants_closure(step.optimizer)
        self._tries = False  # whether compiled forwards have not been through a call yet

    def may_hand_back(self) -> bool:
        """Return True unless later steps run in torch in any case."""
        step = self.step
        return not (step.shapes.endless or step.weights.replicated or isinstance(step.updates, UpdateInTorch))

    def hand_back(self, anew: bool = True) -> bool:
        """Let the step go on compiled from torch's values, with the gradients that wait. Return False if it cannot: the
        call has left parameters that the optimizer does not hold. anew: forget what is captured."""
        waiting = self.gradients()
        try:
            self.step.refresh()
        except UserError:
            return False
        self.step.grads = self.step.weights.placed(dict(waiting))
        self.set_gradients({})
        if anew:
            self.step.capture_anew()
        return True

    def compile_forwards(self) -> None:
        """Compile the modules' forward passes, for when the loss calls them."""
        from torch_bridge.capture.module_call import compile_calls

        compile_calls(self.step.weights.given.values())
        self._tries = True

    def set_gradients(self, grads: Mapping[str, Any]) -> None:
        """Store these gradients for the next update."""
        self.bridge.set_gradients(self.step.weights.tensors, self.parameters, grads)

    def gradients(self) -> dict[str, Any]:
        """Return the gradients that wait for an update."""
        return self.bridge.gradients(self.step.weights.tensors, self.parameters)

    def __call__(self, batch: Any, update: bool | None) -> Any:
        if not self._tries:
            return self._run(batch, update)
        self._tries, modules = False, list(self.step.weights.given.values())
        restore, waiting = self.bridge.state_of(modules), self.gradients()
        try:
            return self._run(batch, update)
        except RuntimeError as error:
            if "double backward" not in str(error):
                raise
        from torch_bridge.capture.module_call import leave_calls

        leave_calls(modules)
        restore()
        self.set_gradients(waiting)
        log.warning("the loss differentiates a gradient of compiled modules: torch runs the steps whole")
        return self._run(batch, update)

    def _run(self, batch: Any, update: bool | None) -> Any:
        step, weights = self.step, self.step.weights
        if weights.dirty:
            weights.sync()  # another update of these modules runs compiled
        updating = (step.count + 1) % step.accumulate == 0 if update is None else update
        divisor = step.accumulate if update is None else 1
        if self._evaluates and not (updating and divisor == 1 and not step.grads):
            raise UserError(
                f"{type(step.optimizer).__name__} evaluates one loss several times per step(): give it whole batches, "
                "without accumulate or update=False"
            )
        loss, parts, norm = self._minimized(batch) if self._evaluates else self._stepped(batch, updating, divisor)
        step.count += 1
        step.grad_norm = None if norm is None else weights.lazy.LazyScalar(norm)
        if updating and step.scheduler is not None:
            step.scheduler.step()
        step.parts = {name: weights.lazy.LazyScalar(value) for name, value in parts.items()}
        return (weights.lazy.LazyScalar(loss), step.parts) if parts else weights.lazy.LazyScalar(loss)

    def _stepped(self, batch: Any, updating: bool, divisor: int) -> tuple[Any, dict, Any]:
        """Return the loss, the values to log and, if the optimizer steps, the gradient norm."""
        loss, parts = self._backward(batch)
        if not updating:
            return loss, parts, None
        again = (lambda: self._backward(batch)[0]) if divisor == 1 else None
        step = self.step
        return loss, parts, self.bridge.update(step.optimizer, step.clip_norm, step.clipped, divisor, again)

    def _minimized(self, batch: Any) -> tuple[Any, dict, Any]:
        """Return as `_stepped`, for an optimizer with a closure (LBFGS): the first evaluation's, as its step() does."""
        step, found = self.step, []

        def evaluate() -> Any:
            step.optimizer.zero_grad()
            loss, parts = self._backward(batch)
            found.append((loss, parts, self.bridge.clip(step.optimizer, step.clip_norm, step.clipped)))
            return loss

        step.optimizer.step(evaluate)
        step.optimizer.zero_grad()
        return found[0]

    def _backward(self, batch: Any) -> tuple[Any, dict]:
        step = self.step
        lowered = step.precision.compute != step.precision.params
        for_good = step.torch is not None  # the modules then run compiled, which a mode of torch's would stop
        with (
            contextlib.nullcontext()
            if for_good
            else self.bridge.twice_differentiable(step.weights.arguments, step.loss_fn)
        ):
            return self.bridge.backward(step.weights.arguments, step.loss_fn, batch, step.optimizer, lowered)
