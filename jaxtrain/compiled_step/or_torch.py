"""A compiled step that falls back to torch if it cannot be compiled, for trainers of the user's own objects."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxtrain import compiled_step
from jaxtrain.errors import LateEdit, UserError


class StepOrTorch:
    """One update of a torch module: compiled, or run by torch if some part of it cannot be recorded (a branch on
    values, an optimizer without a counterpart, objects that are not torch's).

    Arguments as in `compile`; gradients are summed over calls until one with `update`. Programs are waited for, for the
    same bits in each run. say: receives the reason for the fallback, once. scaler: a GradScaler for the steps that
    torch runs. `in_torch`: torch runs the steps. `dirty`: torch's objects hold older values than the device.
    """

    def __init__(
        self,
        module: Any,
        loss_fn: Callable,
        optimizer: Any,
        scheduler: Any = None,
        *,
        clip_norm: float | None = None,
        precision: Literal["fp32", "bf16"] = "fp32",
        shard: str | Mapping[str, Any] = "ddp",
        say: Callable[[str], None],
        scaler: Any = None,
    ):
        from torch_bridge.torch_step import TorchStep, are_torchs

        self.say = say
        self.eager = TorchStep(module, loss_fn, optimizer, scheduler, clip_norm, precision == "bf16", scaler)
        self.compiled: compiled_step.CompiledStep | None = None
        self._forward: Callable | None = None
        if not are_torchs(module, optimizer) or self._clipping_is_replaced():
            return
        try:
            self.compiled = compiled_step.compile(
                module, loss_fn, optimizer, scheduler, clip_norm=clip_norm, precision=precision, shard=shard, wait=True
            )
            self._forward = self.compiled.eval()  # kept, because it caches the compiled programs
        except UserError as error:
            self._give_up(error)

    @property
    def in_torch(self) -> bool:
        return self.compiled is None

    @property
    def dirty(self) -> bool:
        return self.compiled is not None and self.compiled.ahead

    def __call__(self, batch: Any, update: bool = True) -> Any:
        """Run one step; return the loss, or (loss, values to log), as the loss function does."""
        if self.compiled is not None:
            try:
                if self._clipping_is_replaced():
                    raise UserError("torch.nn.utils.clip_grad_norm_ was replaced, which a compiled step would not call")
                return self.compiled.captured(batch, update)
            except LateEdit:
                raise  # earlier steps used wrong values: falling back does not repair them
            except UserError as error:
                self._give_up(error)
        return self.eager(batch, update)

    def _clipping_is_replaced(self) -> bool:
        from torch_bridge.torch_step import clipping_is_replaced

        return self.eager.clip_norm is not None and clipping_is_replaced()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs in evaluation mode, without gradients, as torch tensors."""
        if self._forward is not None:
            try:
                return self._forward(*args, **kwargs)
            except UserError as error:
                self.say(f"evaluation runs in torch, not compiled: {error}")
                self._forward = None
        self.sync()
        return self.eager.forward(*args, **kwargs)

    def drop_gradients(self) -> None:
        """Drop the gradients that calls without an update have summed."""
        if self.compiled is not None:
            self.compiled.grads = {}
        else:
            self.eager.optimizer.zero_grad()

    def sync(self) -> None:
        """Write weights, buffers and optimizer state into the torch objects, if those are older."""
        if self.compiled is not None and self.compiled.ahead:
            self.compiled.sync()

    def _give_up(self, error: UserError) -> None:
        """Switch to torch. Raises the error if gradients that torch does not have wait for an update."""
        if self.compiled is not None:
            if self.compiled.grads:
                raise error
            if self.compiled.ahead:
                self.compiled.sync()
        self.say(f"training runs in torch, not compiled: {error}")
        self.compiled = self._forward = None
