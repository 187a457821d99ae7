"""Fast path of the Trainer: one engine run that updates the trainer's attributes and files after every epoch."""

import dataclasses
import itertools
import math
import pathlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from tqdm import tqdm

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.errors import OtherModel
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import is_checkpoint_file
from jaxtrain.systems.fmri_autoencoder.torch_blocks import in_its_types
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_head import MultimodalAutoencoder
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.from_torch import unwrapped
from torch_bridge.optimizers import own_step
from torch_bridge.torch_step import clipping_is_replaced, replaced_forward

__all__ = ["Made", "load_weights", "options_of", "read", "settings_of", "train", "unwrapped", "workers_of"]
STOCK = (SherlockAutoencoder, MultimodalAutoencoder)


def settings_of(trainer: Any):
    """Return the checked config of a trainer's run."""
    from jaxtrain import config_io

    model = trainer._model
    options = model.options if isinstance(model, STOCK) else Gen1Options()
    config = dataclasses.replace(trainer.config, num_epochs=max(1, trainer.config.num_epochs))  # of 0 none is run
    values = config.settings(
        options.model_dump(),
        isinstance(options, HeadOptions),
        len(trainer.train_dataset),
        accelerator=jax.default_backend() != "cpu",  # autocast does nothing on a CPU either
    )
    return config_io.check(values, "TrainingConfig")[1]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


@dataclasses.dataclass(frozen=True)
class Made:
    """The objects that a trainer's constructor created, recorded to detect changes by the user."""

    steps: Mapping[str, Any]
    objects: Mapping[str, Any]
    options: list[dict[str, Any]]
    criterion: str

    @classmethod
    def of(cls, trainer: Any, steps: Mapping[str, Any]) -> "Made":
        """Record a trainer's objects. steps: the loop's methods as the original's trainer has them."""
        names = ("train_loader", "val_loader", "criterion", "scheduler", "train_dataset", "val_dataset")
        objects = {name: getattr(trainer, name) for name in names} | {"optimizer": trainer._optimizer}
        objects["model"] = trainer._model
        return cls(steps, objects, options_of(trainer._optimizer), repr(trainer.criterion))

    def changed(self, trainer: Any) -> str | None:
        """Return why the engine's own loop would differ from the trainer's; None if it would not."""
        for name, own in self.steps.items():
            if getattr(type(trainer), name) is not own or name in vars(trainer):
                return f"{name} is your own"
        for name, value in self.objects.items():
            if getattr(trainer, f"_{name}" if name in ("model", "optimizer") else name) is not value:
                return f"trainer.{name} is your own"
        if self.options != options_of(trainer._optimizer):
            return "the optimizer's param_groups were changed"
        if repr(trainer.criterion) != self.criterion or _hooked(trainer.criterion):
            return "the criterion was changed"
        if own_step(trainer._optimizer):
            return own_step(trainer._optimizer)
        for part in (trainer._model, trainer.criterion):
            if forward := replaced_forward(part):
                return f"the forward of {forward} was replaced"
        if clipping_is_replaced():
            return "torch.nn.utils.clip_grad_norm_ is your own"
        return _altered(trainer._model)


def _hooked(module: torch.nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(inner, name) for inner in module.modules() for name in hooks) or any(
        tensor._backward_hooks for tensor in module.parameters()
    )


def _altered(model: torch.nn.Module) -> str | None:
    """Return what makes a module differ from its options' description; None for the original's own."""
    if type(model) not in STOCK:
        return f"the model is a {type(model).__name__}"
    if _hooked(model):
        return "the model has hooks"
    with torch.device("meta"):
        plain = type(model).of(model.options)
    own = [(type(inner), "forward" in vars(inner)) for inner in model.modules()]
    if own != [(type(inner), False) for inner in plain.modules()] or repr(model) != repr(plain):
        return "layers of the model were changed"
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return "some of the model's parameters are frozen"
    if any(tensor.dtype not in (torch.float32, torch.int64) for tensor in model.state_dict().values()):
        return "the model is not float32"
    return None


def train(trainer: Any) -> None:
    """Train on the engine, keeping the trainer's attributes up to date."""
    from jaxtrain.task import find_task
    from jaxtrain.train.trainer import Trainer as Engine

    config, settings = trainer.config, trainer.settings
    if trainer.train_loader.batch_size == 1:
        raise UserError(
            "Trainer: training on batches of 1 (config.batch_size, or as many samples), wanted 2 or more: BatchNorm "
            "expects more than 1 value per channel when training"
        )
    update = {"evaluation": settings.evaluation.model_copy(update={"patience": None})}  # the trainer stops the run
    if _asks_to_validate(trainer):
        update["evaluation"] = update["evaluation"].model_copy(update={"every_epochs": None, "every_steps": None})
        per_call = math.gcd(settings.train.steps_per_call, len(trainer.train_loader))  # no call goes past an epoch
        update["train"] = settings.train.model_copy(update={"steps_per_call": per_call})
    update["init_from"] = None  # the trainer has already loaded it
    update["run"] = settings.run.model_copy(update={"dir": _folder(config.resume_from, settings.run.folder)})
    if "run" not in config.overrides:
        update["run"] = update["run"].model_copy(update={"quiet": True})  # the trainer prints the original's lines
    settings = settings.model_copy(update=update)
    follower = Follower(trainer)
    task = dataclasses.replace(find_task(settings.task), build_data=lambda config, split: None)  # the given data only
    engine = Engine(None, trainer.train_dataset, trainer.val_dataset, settings, task=task, callbacks=[follower])
    trainer.engine = follower.engine = engine
    if not any(parameter.is_meta for parameter in trainer._model.parameters()):
        engine.load_state_dict(to_numpy(trainer._model.state_dict()))
    if trainer.global_step:
        _go_on(trainer, engine)
    resume = config.resume_from
    history = engine.train("auto" if resume is None or is_checkpoint_file(resume) else resume)
    follower.finish(history)


def _folder(resume_from: str | None, folder: pathlib.Path) -> str:
    """Return the folder of the engine's own files: `folder`, or run_2, run_3, ... in it if it holds another run.

    resume_from: a run folder in or at `folder` is continued.
    """
    from jaxtrain.runtime.launch import broadcast_from_process_zero

    def holds_a_run(place: pathlib.Path) -> bool:
        return any(path.name.split(".")[0].isdigit() for path in (place / "checkpoints").glob("*"))

    def choose() -> str:
        if resume_from is not None and not is_checkpoint_file(resume_from):
            asked = pathlib.Path(resume_from).expanduser()
            if folder.resolve() in (asked.resolve(), *asked.resolve().parents):
                return str(asked)
        if not holds_a_run(folder):
            return str(folder)
        return next(str(own) for n in itertools.count(2) if not holds_a_run(own := folder / f"run_{n}"))

    return broadcast_from_process_zero("the Trainer's folder", choose)


def _asks_to_validate(trainer: Any) -> bool:
    """Return True if the follower decides when to validate: the engine counts from the interval's other end."""
    return trainer.config.validate_every > 1 and "evaluation" not in trainer.config.overrides


def _go_on(trainer: Any, engine: Any) -> None:
    """Start the engine at the trainer's step, with the trainer's optimizer moments."""
    from jaxtrain.train.checkpoint import init_from
    from torch_bridge.files.checkpoint import TrainingCheckpoint

    saved = TrainingCheckpoint(
        pathlib.Path(trainer.config.resume_from or "the trainer"),
        {},
        to_numpy(trainer._optimizer.state_dict()),
        step=trainer.global_step,
        updates=trainer.global_step,
    )
    for line in init_from.go_on(engine.program, saved).lines:
        trainer._say(line)


class Follower:
    """Engine callback that keeps the trainer's counters, histories, log lines, checkpoints and early stopping."""

    SAVED = ("best_val_loss", "_least_val_loss", "epochs_without_improvement", "train_history", "val_history")

    def __init__(self, trainer: Any):
        self.trainer, self.engine = trainer, None
        self.steps: list[Any] = []
        self.bar: Any = None
        self.train_metrics: dict[str, float] | None = None

    def on_step_end(self, engine, step, metrics) -> None:
        self.steps.append(metrics)
        self.trainer.global_step = step
        if self.bar is None:
            per_epoch = engine.steps_per_epoch
            self.bar = bar(f"Epoch {(step - 1) // per_epoch + 1}", total=per_epoch, initial=(step - 1) % per_epoch)
        self.bar.update(1)

    def on_epoch_end(self, engine, epoch) -> None:
        self.bar.close()
        self.bar = None
        rows = [dict(metrics) for metrics in self.steps]
        names = [name for name in rows[0] if name not in ("weight", "tokens", "skipped", "grad_norm")]
        self.train_metrics = _named({name: float(np.mean([row[name] for row in rows])) for name in names})
        rate = engine.program.schedule(epoch * engine.steps_per_epoch)  # after the epoch's last update, as torch's
        self.train_metrics["lr"] = float(rate) * self.trainer.config.learning_rate
        self.steps = []
        self.trainer.current_epoch = epoch - 1
        if not self._evaluates(epoch):
            self._end(epoch, None)
        elif _asks_to_validate(self.trainer):
            engine.run.evaluate()

    def on_evaluation_end(self, engine, step, metrics) -> None:
        if self.train_metrics is not None:  # None: a resumed run evaluates first
            self._end(self.trainer.current_epoch + 1, _named(metrics))

    def _evaluates(self, epoch: int) -> bool:
        program = self.engine.program
        if _asks_to_validate(self.trainer):
            return program.has_validation and (epoch - 1) % self.trainer.config.validate_every == 0
        every = self.engine.config.evaluation.every_epochs or 1
        return program.has_validation and (epoch % every == 0 or epoch * program.steps_per_epoch == program.total_steps)

    def _end(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
        self.trainer._source = self.refresh
        if jax.process_count() > 1:
            self.trainer._refresh()  # sharded weights are gathered by all processes together, not by the one that saves
        if self.trainer.end_epoch(epoch - 1, self.train_metrics, val_metrics):
            self.engine.run.stop()
        self.train_metrics = None

    def refresh(self) -> None:
        """Copy the engine's state into the torch module, its optimizer and its scheduler."""
        trainer, engine = self.trainer, self.engine
        load_weights(trainer, {key: to_torch(value) for key, value in engine.state_dict().items()}, "the engine")
        trainer._optimizer.load_state_dict(_optimizer_state(engine))
        if trainer.scheduler is not None:
            trainer.scheduler.go_to(int(engine.state.updates))
        trainer._made = dataclasses.replace(trainer._made, options=options_of(trainer._optimizer))

    def finish(self, history: Mapping[str, Any]) -> None:
        """Record the end of a run; if the run was complete before it started, take its history too."""
        trainer = self.trainer
        trainer._source, trainer.global_step = self.refresh, int(self.engine.state.step)
        trainer.current_epoch = max(0, trainer.global_step // self.engine.steps_per_epoch - 1)
        if not trainer.train_history:
            trainer.train_history = [_named(entry) for entry in history["train_history"]]
            trainer.val_history = [_named(entry) for entry in history["val_history"]]
            trainer.best_val_loss = history["best_val_loss"]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.trainer, name) for name in self.SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self.trainer, name, value)


def workers_of(dataset: Any, wanted: int, say: Callable[[str], None]) -> int:
    """Return a loader's number of worker processes: 0, with a message, if they could not import the dataset's class."""
    try:
        pickle.dumps(type(dataset))
    except (pickle.PicklingError, AttributeError) as error:
        if wanted:
            say(f"samples are read in this process, not by {wanted} workers: {error}. Define the class in a module")
        return 0
    return wanted


def bar(title: str, **options: Any) -> tqdm:
    """Return the original's progress bar of an epoch; it is shown on a terminal, in the first process only."""
    return tqdm(desc=title, leave=False, disable=True if jax.process_index() else None, **options)


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the engine's metrics, with the loss under the original's name."""
    return {"total_loss" if name == "loss" else name: value for name, value in metrics.items()}


def _optimizer_state(engine: Any) -> dict[str, Any]:
    """Return the engine's moments and rates as torch.optim.AdamW's state_dict."""
    from jaxtrain.train.checkpoint import torch_checkpoint

    program = engine.program
    tree = torch_checkpoint.of_program(program)
    state = jax.tree.map(np.asarray, tree["optimizer"]["state"])
    return {
        "state": {number: {k: to_torch(v) for k, v in entry.items()} for number, entry in state.items()},
        "param_groups": [
            {k: v for k, v in group.items() if k not in ("name", "param_names")}
            for group in tree["optimizer"]["param_groups"]
        ],
    }


def load_weights(trainer: Any, state: Mapping[str, Any], source: Any) -> None:
    """Load weights into the trainer's module in place; a module on the meta device gets its memory now.

    Raises OtherModel if they do not fit.
    """
    from torch_bridge.state_dict import convert_ddp_state

    model, state = trainer._model, convert_ddp_state(dict(state))
    meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    try:
        model.load_state_dict(in_its_types(model, state) if meta else state, strict=True, assign=meta)
    except RuntimeError as error:
        raise OtherModel(f"{source}: {error}") from None
    if meta:
        kind, options = type(trainer._optimizer), options_of(trainer._optimizer)
        trainer._optimizer = kind(model.parameters())
        trainer._optimizer.param_groups[0].update(options[0])
        if trainer.scheduler is not None:
            trainer.scheduler.optimizer = trainer._optimizer
        trainer._made = dataclasses.replace(
            trainer._made, objects={**trainer._made.objects, "optimizer": trainer._optimizer}
        )


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read a checkpoint file of the original. Raises UserError for any other file."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path}: cannot be read as a torch checkpoint: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or "model_state_dict" not in found:
        held = ", ".join(map(str, list(found)[:6])) if isinstance(found, dict) else type(found).__name__
        raise UserError(f"{path}: has no model_state_dict; it holds {held}")
    return found
