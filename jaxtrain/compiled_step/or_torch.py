"""A compiled step that torch takes over where it cannot be compiled: what a trainer of a user's own objects needs."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain import compiled_step
from jaxtrain.errors import LateEdit, UserError


class StepOrTorch:
    """One update of a torch module, compiled; torch's own, after a line that says why, where something of it cannot be
    recorded (a branch on values, an optimizer without a counterpart, a mock).

    Arguments as those of `compile`; the batch's gradients are summed until a call with `update`. say: gets the reason,
    once. called: what loss_fn calls beside the module; a mock among it is called at every step, never recorded.
    scaler: a GradScaler of the steps that torch runs. `in_torch`: torch runs the steps. `dirty`: torch's objects hold
    older values than the device.
    """

    def __init__(
        self,
        module: Any,
        loss_fn: Callable,
        optimizer: Any,
        scheduler: Any = None,
        *,
        clip_norm: float | None = None,
        precision: str = "fp32",
        say: Callable[[str], None],
        called: Sequence[Any] = (),
        scaler: Any = None,
    ):
        from torch_bridge.torch_step import TorchStep, recordable

        self.say = say
        self.eager = TorchStep(module, loss_fn, optimizer, scheduler, clip_norm, precision == "bf16", scaler)
        self.compiled: compiled_step.CompiledStep | None = None
        self._forward: Callable | None = None
        if not recordable(module, optimizer, *called, scaler):
            return
        try:
            self.compiled = compiled_step.compile(
                module, loss_fn, optimizer, scheduler, clip_norm=clip_norm, precision=precision
            )
            self._forward = self.compiled.eval()  # kept, because it holds what is compiled
        except UserError as error:
            self._give_up(error)

    @property
    def in_torch(self) -> bool:
        return self.compiled is None

    @property
    def dirty(self) -> bool:
        return self.compiled is not None and self.compiled.ahead

    def __call__(self, batch: Any, update: bool = True) -> Any:
        """The loss, or (loss, values to log), as the loss function gives them."""
        if self.compiled is not None:
            try:
                call = self.compiled.prepare(batch, update)
                if self.compiled.changes:
                    raise UserError(self.compiled.changes)
                return call()
            except LateEdit:
                raise  # steps that are made already went wrong
            except UserError as error:
                self._give_up(error)
        return self.eager(batch, update)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs in evaluation mode, without gradients, as torch tensors."""
        if self._forward is not None:
            try:
                return self._forward(*args, **kwargs)
            except UserError as error:
                self.say(f"evaluation runs in torch, not compiled: {error}")
                self._forward = None
        self.sync()
        return self.eager.forward(*args, **kwargs)

    def drop_gradients(self) -> None:
        """Forget the gradients of calls without an update."""
        if self.compiled is not None:
            self.compiled.grads = {}
        else:
            self.eager.optimizer.zero_grad()

    def sync(self) -> None:
        """Put weights, buffers and the optimizer's state back into the torch objects, where they are older."""
        if self.compiled is not None and self.compiled.ahead:
            self.compiled.sync()

    def _give_up(self, error: UserError) -> None:
        """Go on in torch. Raises the error where gradients that torch does not have wait for an update."""
        if self.compiled is not None:
            if self.compiled.grads:
                raise error
            if self.compiled.ahead:
                self.compiled.write()
        self.say(f"training runs in torch, not compiled: {error}")
        self.compiled = self._forward = None
