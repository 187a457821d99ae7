"""Lightning's Trainer with its training step compiled by XLA: `from jaxtrain.lightning import Trainer`.

The loop stays Lightning's own: flags, callbacks, loggers, progress, validation and `.ckpt` files are its code. Only
`training_step`, its backward pass, clipping and the optimizer's update run as one XLA program. Where they cannot be one
(manual optimization, several devices, hooks on gradients), the modules run compiled and torch does the rest.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.utilities import rank_zero_info

from jaxtrain.compiled_step import CompiledStep
from jaxtrain.compiled_step import compile as compile_step
from jaxtrain.errors import UserError
from torch_bridge.compiled_call import compiled_forwards

GRADIENT_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
)
BETWEEN_STEPS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad")
EPOCH, STEP = "jaxtrain_current_epoch", "jaxtrain_global_step"  # beside the batch


class Trainer(pl.Trainer):
    """lightning.Trainer with a compiled training step. Flags, methods and files are Lightning's own."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if self.precision not in ("32-true", "bf16-mixed"):
            raise UserError(f"Trainer(precision={self.precision!r}): take 32-true or bf16-mixed")
        self.callbacks.insert(0, _Sync())  # before callbacks that read weights

    def fit(self, model: Any, *arguments: Any, **options: Any) -> None:
        """Train as Lightning does. Raises UserError at the first call of a module that cannot be converted."""
        apart = _apart(self, model)
        loop = self.fit_loop.epoch_loop
        loop.automatic_optimization = _AutomaticOptimization(self) if apart else _CompiledOptimization(self)
        if apart:
            rank_zero_info(f"{apart}: forward and backward of the modules run compiled, updates run in torch")
        with compiled_forwards(model) if apart else contextlib.nullcontext():
            super().fit(model, *arguments, **options)
        self.sync()

    def sync(self) -> None:
        """Write the trained weights and the optimizer's state into the torch module and optimizer."""
        step = getattr(self.fit_loop.epoch_loop.automatic_optimization, "step", None)
        if step is not None and step.weights.dirty:
            step.sync()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.sync()
        super().save_checkpoint(*arguments, **options)


class _Sync(pl.Callback):
    """Writes the weights back where Lightning and its callbacks read them."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        trainer.sync()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.sync()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.sync()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        trainer.sync()


class _CompiledOptimization(_AutomaticOptimization):
    """Runs the compiled step where Lightning runs training_step and backward; torch's own step then finds no gradient
    and moves nothing."""

    step: CompiledStep | None = None

    def _make_step_fn(self, kwargs: OrderedDict) -> Any:
        return lambda: self._compiled_step(kwargs)

    def _make_backward_fn(self, optimizer: Any) -> None:
        return None

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> None:
        return None

    def _compiled_step(self, kwargs: OrderedDict) -> ClosureResult:
        trainer = self.trainer
        module = trainer.lightning_module
        optimizer = trainer.optimizers[0]
        if self.step is None or self._groups != [len(group["params"]) for group in optimizer.param_groups]:
            trainer.sync()  # a callback has added a group: another program, on the weights so far
            self._groups = [len(group["params"]) for group in optimizer.param_groups]
            self.recorder = _Recorder(module, trainer, "batch_idx" in kwargs)
            limit = trainer.gradient_clip_val
            self.step = compile_step(module, self.recorder.loss, optimizer, clip_norm=limit or None)
            self._watched = _read_between_steps(trainer)
        updating = not trainer.fit_loop._should_accumulate()
        self.step.count = trainer.fit_loop.epoch_loop.total_batch_idx  # of the random keys
        batch = {"batch": kwargs["batch"], EPOCH: torch.tensor(float(trainer.current_epoch))}
        batch[STEP] = torch.tensor(float(trainer.global_step))
        with trainer.profiler.profile("[CompiledStep]training_step"):
            result = self.step(batch, update=updating)
        loss, logged = result if isinstance(result, tuple) else (result, {})
        value = torch.tensor(float(loss) * trainer.accumulate_grad_batches)  # as training_step returned it
        self.recorder.replay(module, trainer, {name: torch.tensor(float(scalar)) for name, scalar in logged.items()})
        if updating and self._watched:
            trainer.sync()
        return ClosureResult.from_training_step_output(value, trainer.accumulate_grad_batches)


class _Recorder:
    """training_step as a loss function, and the log calls that it makes."""

    def __init__(self, module: Any, trainer: Any, takes_index: bool):
        self.module, self.trainer, self.takes_index = module, trainer, takes_index
        self.calls: dict[str, dict[str, Any]] = {}

    def loss(self, module: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run training_step and return its loss and what it logs. Recorded once."""
        given = [batch["batch"]] + ([_BatchIndex()] if self.takes_index else [])
        logged: dict[str, torch.Tensor] = {}
        precision = self.trainer.precision_plugin.train_step_context()
        with _inside(module, batch[EPOCH], batch[STEP], self._log_into(logged)), precision:
            output = module.training_step(*given)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"training_step returned {type(output).__name__}, wanted a loss, or a dict with 'loss'")
        return loss / self.trainer.accumulate_grad_batches, logged

    def _log_into(self, logged: dict[str, torch.Tensor]) -> Any:
        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            if arguments:
                options["prog_bar"] = arguments[0]
            self.calls[name] = options
            value = value.compute() if hasattr(value, "compute") else value
            logged[name] = torch.as_tensor(value).detach().float()

        return log

    def replay(self, module: Any, trainer: Any, values: dict[str, torch.Tensor]) -> None:
        """Make the log calls with this step's values, in Lightning's own place for them."""
        if not values:
            return
        before = module._current_fx_name
        module._current_fx_name = "training_step"
        try:
            for name, value in values.items():
                module.log(name, value, **self.calls[name])
        finally:
            module._current_fx_name = before


@contextlib.contextmanager
def _inside(module: Any, epoch: torch.Tensor, step: torch.Tensor, log: Any) -> Iterator[None]:
    """While recording: current_epoch and global_step are tensors of the program, log calls are kept."""
    kind = type(module)
    own = type(kind.__name__, (kind,), {"current_epoch": epoch, "global_step": step, "__module__": kind.__module__})

    def log_dict(values: Any, *arguments: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, *arguments, **options)

    module.__class__ = own
    vars(module).update(log=log, log_dict=log_dict)
    try:
        yield
    finally:
        module.__class__ = kind
        for name in ("log", "log_dict"):
            del vars(module)[name]


class _BatchIndex:
    """batch_idx while training_step is recorded: the record would keep the number of one batch."""

    def _refuse(self, *arguments: Any) -> Any:
        raise UserError(
            "training_step uses batch_idx, which a compiled step does not know: use self.global_step, or do it in "
            "on_train_batch_end"
        )

    __int__ = __index__ = __bool__ = __float__ = __add__ = __radd__ = __mod__ = __eq__ = __lt__ = __gt__ = _refuse
    __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __floordiv__ = __le__ = __ge__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _overrides(instance: Any, base: type, hook: str) -> bool:
    return getattr(type(instance), hook, None) is not getattr(base, hook, None)


def _own_callbacks(trainer: Any) -> list[Any]:
    known = ("lightning.", "pytorch_lightning.", __name__)
    return [callback for callback in trainer.callbacks if not type(callback).__module__.startswith(known)]


def _apart(trainer: Any, module: Any) -> str:
    """Return the reason why a step cannot be one program, "" where it can."""
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimizes manually"
    if trainer.world_size > 1:
        return f"{trainer.world_size} processes share a step"
    if (
        trainer.gradient_clip_val
        and str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() != "norm"
    ):
        return "gradients are clipped by value"
    for hook in GRADIENT_HOOKS:
        owners = [module] if _overrides(module, pl.LightningModule, hook) else []
        owners += [
            c for c in _own_callbacks(trainer) if hasattr(pl.Callback, hook) and _overrides(c, pl.Callback, hook)
        ]
        if owners:
            return f"{type(owners[0]).__name__}.{hook} takes part in a step"
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        return "StochasticWeightAveraging changes optimizer and weights"
    return ""


def _read_between_steps(trainer: Any) -> bool:
    """Tell whether a hook of the user's own is called between steps, where it may read the module."""
    module = trainer.lightning_module
    return any(_overrides(module, pl.LightningModule, hook) for hook in BETWEEN_STEPS) or any(
        _overrides(callback, pl.Callback, hook) for callback in _own_callbacks(trainer) for hook in BETWEEN_STEPS
    )
