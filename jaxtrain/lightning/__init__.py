"""Lightning's Trainer with its training step compiled by XLA: `from jaxtrain.lightning import Trainer`.

The loop stays Lightning's own: flags, callbacks, loggers, progress, validation and `.ckpt` files are its code. Only
`training_step`, its backward pass, clipping and the optimizer's update run as one XLA program. If that is impossible
(manual optimization, several devices, hooks on gradients), the modules run compiled and torch does the rest. Every
other public name of `lightning` and of `lightning.pytorch` is Lightning's own: `import jaxtrain.lightning as L` serves
for both.
"""

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from lightning import pytorch as pl
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from jaxtrain import drop_in_sharding
from jaxtrain.compiled_step import CompiledStep
from jaxtrain.compiled_step import compile as compile_step
from jaxtrain.drop_in_lengths import RoundedLengths
from jaxtrain.errors import UserError
from jaxtrain.lazy import library_names, signature_of
from jaxtrain.runtime import host_memory
from torch_bridge.datasets.map_style import TorchRandom
from torch_bridge.from_torch import unwrapped
from torch_bridge.lowering.python.names import mentions
from torch_bridge.step_rules import reason_of
from torch_bridge.torch_step import set_gradients
from torch_bridge.training.eager_value import has_collate, rows_of, uses_batch_statistics, value_of
from torch_bridge.training.host_calls import HostCalls

if TYPE_CHECKING:
    from lightning import *  # noqa: F403  # pyright: ignore[reportAssignmentType]
    from lightning import fabric as fabric
    from lightning.pytorch import *  # noqa: F403  # pyright: ignore[reportAssignmentType]
    from lightning.pytorch import callbacks as callbacks
    from lightning.pytorch import loggers as loggers
    from lightning.pytorch import plugins as plugins
    from lightning.pytorch import profilers as profilers
    from lightning.pytorch import strategies as strategies
    from lightning.pytorch import tuner as tuner
    from lightning.pytorch import utilities as utilities

    from jaxtrain.lightning import cli as cli
    from jaxtrain.lightning.cli import LightningCLI as LightningCLI
else:
    __getattr__, __dir__ = library_names(__name__, "lightning.pytorch", "lightning", f"{__name__}.cli")
pytorch: ModuleType = sys.modules[__name__]  # L.pytorch.Trainer is the compiled one, too

GRADIENT_HOOKS = (
    "on_before_backward",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
)
HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_")]
LIBRARIES = ("lightning.", "pytorch_lightning.", __name__)


class Trainer(pl.Trainer):
    """lightning.Trainer with a compiled training step. Flags, methods and files are Lightning's own."""

    @signature_of(pl.Trainer.__init__)
    def __init__(self, *arguments: Any, **options: Any):
        for name in ("callbacks", "logger"):
            given = options.get(name)
            for item in given if isinstance(given, (list, tuple)) else [given]:
                _check_package(item)
        self._shard, options["strategy"] = drop_in_sharding.of_lightning(options.get("strategy", "auto"))
        super().__init__(*arguments, **options)
        if self.precision not in ("32-true", "bf16-mixed"):
            raise UserError(f"Trainer(precision={self.precision!r}): take 32-true or bf16-mixed")
        strategy = type(self.strategy).__name__
        if strategy in ("DeepSpeedStrategy", "ModelParallelStrategy"):
            raise UserError(f"{strategy} takes the parameters apart; take strategy='fsdp', which XLA computes")
        if self._shard != "ddp" and self.world_size > 1:
            raise UserError(
                f"Trainer(strategy=...): {self.world_size} processes, and one drives all devices of its machine here: "
                "start it alone, with devices=1"
            )
        if self._detect_anomaly:
            raise UserError("Trainer(detect_anomaly=True) watches torch's autograd, which does not run; leave it out")
        if self.world_size > 1 and getattr(self.strategy, "_layer_sync", None) is not None:
            raise UserError("Trainer(sync_batchnorm=True) has no counterpart on several processes; leave it out")

    @signature_of(pl.Trainer.fit)
    def fit(self, model: Any, *arguments: Any, **options: Any) -> None:
        """Train as Lightning does. Raises UserError at the first call of a module that cannot be converted."""
        model = unwrapped(model)  # torch.compile's wrapper is removed
        _check_package(model)
        loop, compiled = self.fit_loop.epoch_loop, _CompiledOptimization(self)
        compiled.optim_progress = loop.automatic_optimization.optim_progress  # counts on from an earlier fit
        loop.automatic_optimization = compiled
        apart = _apart(self, model)
        with host_memory.kept(), _synced(self), contextlib.ExitStack() as self._forwards:
            if apart:
                self.go_apart(model, apart)
            super().fit(model, *arguments, **options)
            self.sync()

    def go_apart(self, module: Any, reason: str) -> _AutomaticOptimization:
        """Stop compiling whole steps: from now on only the modules' forward and backward passes are compiled."""
        self.sync()
        rank_zero_info(f"{reason}: forward and backward of the modules run compiled, updates run in torch")
        loop, plain = self.fit_loop.epoch_loop, _AutomaticOptimization(self)
        step = getattr(loop.automatic_optimization, "step", None)
        if step is not None:  # keeps the gradients of an unfinished update
            set_gradients(step.weights.tensors, step.weights.tensors.values(), step.grads)
        plain.optim_progress = loop.automatic_optimization.optim_progress  # continues a checkpoint's or its own
        loop.automatic_optimization = plain
        from torch_bridge.capture.module_call import compiled_calls  # takes seconds, and few trainings need it

        self._forwards.enter_context(compiled_calls(module))
        return plain

    def sync(self) -> None:
        """Write the trained weights and the optimizer's state into the torch module and optimizer."""
        step = getattr(self.fit_loop.epoch_loop.automatic_optimization, "step", None)
        if step is not None and step.ahead:
            step.sync()

    def _fit_impl(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._fit_impl(*arguments, **options)
        except BaseException:
            self.sync()  # before callbacks read the weights in on_exception
            raise

    @signature_of(pl.Trainer.save_checkpoint)
    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.sync()
        super().save_checkpoint(*arguments, **options)


@contextlib.contextmanager
def _synced(trainer: Trainer) -> Iterator[None]:
    """Return a context that writes the trained weights back before Lightning and its callbacks read them: at the end of
    an epoch and of the training, and before a validation."""
    loop = trainer.fit_loop
    places = [(loop, "on_advance_end"), (loop, "on_run_end"), (loop.epoch_loop.val_loop, "run")]
    for owner, name in places:
        setattr(owner, name, functools.partial(_after_sync, trainer, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in places:
            vars(owner).pop(name, None)


def _after_sync(trainer: Trainer, method: Callable, *arguments: Any, **options: Any) -> Any:
    trainer.sync()
    return method(*arguments, **options)


class _CompiledOptimization(_AutomaticOptimization):
    """Automatic optimization that runs the compiled step in place of training_step and backward; torch's optimizer step
    then finds no gradients and changes nothing."""

    step: CompiledStep | None = None
    _settings: Any = None  # trainer settings that decide if a step can be one program

    def _make_step_fn(self, kwargs: OrderedDict) -> Any:
        return self._compiled_step

    def _make_backward_fn(self, optimizer: Any) -> None:
        return None

    def run(self, optimizer: Any, batch_idx: int, kwargs: OrderedDict) -> Any:
        """Run one batch as one program; if that is impossible, leave this and all later batches to torch."""
        reason = self._apart()
        try:
            if not reason:
                self._loss = self._captured(kwargs)
        except UserError as error:
            reason = f"training_step cannot be one program ({reason_of(error)})"
        if reason:
            return self.trainer.go_apart(self.trainer.lightning_module, reason).run(optimizer, batch_idx, kwargs)
        return super().run(optimizer, batch_idx, kwargs)

    def _apart(self) -> str:
        """Return as the function `_apart`, but "" if the settings are unchanged since the last batch. Hooks may change
        them."""
        trainer = self.trainer
        settings = [*trainer.callbacks], trainer.gradient_clip_algorithm, bool(trainer.gradient_clip_val)
        if settings == self._settings:
            return ""
        self._settings = settings
        return _apart(trainer, trainer.lightning_module)

    def _captured(self, kwargs: OrderedDict) -> float:
        """Run training_step, backward and, where it is due, the update as one program; return the loss. Raises
        UserError if that is impossible; nothing has run then."""
        trainer = self.trainer
        module = trainer.lightning_module
        if "batch" not in kwargs:
            raise UserError("training_step takes dataloader_iter and fetches its batches itself")
        optimizer = trainer.optimizers[0]
        groups = [len(group["params"]) for group in optimizer.param_groups]
        if self.step is None or self.step.optimizer is not optimizer or self._groups != groups:
            trainer.sync()  # a hook has added an optimizer or a group: compile anew, from the current weights
            self._groups = groups
            self.calls = HostCalls(module, trainer, trainer.precision == "bf16-mixed")
            resumed = trainer.ckpt_path is not None  # with the bits of a run that was not interrupted
            self.step = compile_step(module, self.calls.training_step, optimizer, shard=trainer._shard, wait=resumed)
            if place := self.step.weights.described():
                rank_zero_info(place)
            self.lengths = _rounded_lengths(trainer, module, self.calls)
        limit = trainer.gradient_clip_val or 0
        self.step.clip_norm = limit if limit > 0 else None
        self.step.count = trainer.fit_loop.epoch_loop.total_batch_idx  # selects the random keys
        arguments = tuple((kwargs | {"batch": self.lengths.fit(kwargs["batch"])}).values())
        inputs = {"arguments": arguments, "divisor": torch.tensor(float(trainer.accumulate_grad_batches))}
        with trainer.profiler.profile("[CompiledStep]training_step"), self.calls.collecting():
            return float(self.step.captured(inputs, update=not trainer.fit_loop._should_accumulate()))

    def _compiled_step(self) -> ClosureResult:
        """Return the result of the step that has run, as Lightning's closure wants it."""
        count = self.trainer.accumulate_grad_batches
        output = self.calls.make()
        extras = {name: value for name, value in output.items() if name != "loss"} if isinstance(output, dict) else {}
        value = torch.tensor(self._loss * count)  # as training_step returned it
        return ClosureResult.from_training_step_output({"loss": value, **extras}, count)


def _rounded_lengths(trainer: Any, module: Any, calls: HostCalls) -> RoundedLengths:
    """Return what pads batches of many lengths to few; it has learned the data set if the collate function is known."""
    lengths = RoundedLengths(rank_zero_info)
    loader = trainer.train_dataloader
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    owners = [(module, pl.LightningModule), *([(trainer.datamodule, DataHooks)] if trainer.datamodule else [])]
    own = any(_overrides(owner, base, hook) for owner, base in owners for hook in hooks)
    if not own and has_collate(loader) and not uses_batch_statistics(module):
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

        def loss(rows: Any) -> torch.Tensor:
            with calls.collecting():
                arguments = (rows, 0) if takes_index else (rows,)
                return calls.training_step(module, {"arguments": arguments, "divisor": torch.tensor(1.0)})

        value = lambda rows: value_of(module, loss, rows)
        lengths.learn(loader.dataset, loader.collate_fn, rows_of(loader) or 1, len(loader), value, [TorchRandom()])
    return lengths


def _check_package(item: Any) -> None:
    """Raise UserError for an object of `pytorch_lightning`, a package whose classes are not those of `lightning`."""
    if any(kind.__module__.startswith("pytorch_lightning.") for kind in type(item).__mro__):
        raise UserError(
            f"{type(item).__name__} is of the package pytorch_lightning, whose classes are others than Lightning's: "
            "write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"
        )


def _overrides(instance: Any, base: type, hook: str) -> bool:
    return getattr(type(instance), hook, None) is not getattr(base, hook, None)


def _users(callback: Any, hook: str) -> bool:
    """Return True if a callback or module has this hook from user code; LambdaCallback keeps it in the instance."""
    owner = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), None)
    return hook in vars(callback) or (owner is not None and not owner.__module__.startswith(LIBRARIES))


def _apart(trainer: Any, module: Any) -> str:
    """Return the reason why a step cannot be one program; "" if it can."""
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
        owners += [c for c in trainer.callbacks if hasattr(pl.Callback, hook) and _users(c, hook)]
        if owners:
            return f"{type(owners[0]).__name__}.{hook} takes part in a step"
    for owner in (module, *trainer.callbacks):
        for hook in HOOKS:
            if _users(owner, hook) and mentions(getattr(owner, hook), "grad"):
                return f"{type(owner).__name__}.{hook} reads gradients"
    if any(isinstance(callback, lightning_callbacks.StochasticWeightAveraging) for callback in trainer.callbacks):
        return "StochasticWeightAveraging changes optimizer and weights"
    return ""
