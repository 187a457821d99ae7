"""The original's Trainer: its config, attributes, methods and files, with this project's engine inside.

A run is the engine's: one compiled program, sharded, resumed where it stood. Where a step of the loop is your own (an
overridden method, a changed model), the loop runs here, with one compiled call per batch, and one line says so.
"""

import copy
import inspect
import math
import pathlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original import checkpoint_files, torch_models
from jaxtrain.systems.memory_lm.original.host_loop import HostLoop
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig
from jaxtrain.systems.memory_lm.original.schedules import original_schedule
from jaxtrain.systems.memory_lm.original.torch_models import Config, checked
from torch_bridge.datasets import to_numpy

STEPS = ("training_step", "compute_loss", "train_epoch", "log_metrics", "save_checkpoint", "check_early_stopping")
SCHEDULE = (
    "warmup_ratio",
    "min_lr_ratio",
    "decay_start_step",
    "decay_start_ratio",
    "wsd_stable_steps",
    "wsd_stable_ratio",
)


class Trainer(HostLoop):
    """config: of load_config. model: a MemoryTransformer or MemoryAdapter of this module (or a subclass) to start from
    and to leave the trained weights in; None makes one. changes: sections of this project's config, that win.

    Attributes, true at every time: model, optimizer, scheduler (lr_scheduler), global_step, epoch, best_loss,
    patience_counter, total_steps, train_dataloader (train_loader), eval_dataloader (val_loader), tokenizer, device,
    config. Results lie under training.output_dir: checkpoint-STEP, best_model and final_model as the original's, and a
    run folder of this project. Raises UserError, a ValueError, for settings out of their range.
    """

    def __init__(self, config: Config, model: torch.nn.Module | None = None, **changes: Any):
        from jaxtrain.task import find_task
        from jaxtrain.train.trainer import Trainer as Engine

        check(config.training)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(42)
        self.config, self._given = config, model
        self._resume, changes = self._origin(changes)
        self.settings = checked(config, **changes)
        self.global_step = self.epoch = self.patience_counter = 0
        self.best_loss = math.inf
        self.engine = Engine(config=self.settings, task=find_task(self.settings.task), callbacks=[Follower(self)])
        self.total_steps = self.engine.total_steps
        if model is not None:
            self.engine.load_state_dict(to_numpy(model.state_dict()))
        super().__init__()

    def _origin(self, changes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """How the engine resumes, and the settings that say from where and into which folder."""
        training = self.config.training
        wanted = {"checkpoint": {**converted(self.config)["checkpoint"], "torch": "original"}}
        if training.resume_from_checkpoint is None:
            return "auto", {**wanted, **changes}
        source = pathlib.Path(training.resume_from_checkpoint).expanduser()
        if not (source / "trainer_state.json").is_file():  # a run folder of this project
            return str(source), {**wanted, "init_from": None, **changes}
        if source.parent.resolve() == pathlib.Path(training.output_dir).expanduser().resolve():
            name = source.name.removeprefix("checkpoint-")
            wanted["run"] = {**converted(self.config)["run"], "dir": str(source.parent / f"resumed-{name}")}
        return "auto", {**wanted, **changes}

    # --- what a run is made of -----------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The model, with the newest weights."""
        model = self._module()
        self._bring_up_to_date()
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer over the model, a group for each part with a rate of its own; with the newest state."""
        optimizer = self._optimizer()
        self._bring_up_to_date()
        return optimizer

    @property
    def scheduler(self) -> torch.optim.lr_scheduler.LambdaLR:
        """The learning rates' factor by update."""
        self._optimizer()
        self._bring_up_to_date()
        return self._scheduler

    lr_scheduler = scheduler

    @property
    def device(self) -> torch.device:
        return next(self._module().parameters()).device

    # --- other trainers' names for the same ------------------------------------------------------------------------

    current_epoch = property(lambda self: self.epoch)
    best_val_loss = property(lambda self: self.best_loss)
    epochs_without_improvement = property(lambda self: self.patience_counter)
    steps_per_epoch = property(lambda self: self.engine.steps_per_epoch)
    accumulation_steps = property(lambda self: self.config.training.gradient_accumulation_steps)
    clip_grad = property(lambda self: self.config.training.max_grad_norm)
    use_amp = property(lambda self: self.config.training.mixed_precision != "no")

    # --- the run -------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end; best_val_loss, train_history and val_history."""
        reason = self._own()
        if reason is not None:
            print(f"the loop runs on the host, one compiled call per batch: {reason}", flush=True)
            return self.train_on_host()
        history = self.engine.train(resume=self._resume)
        if self._given is not None or self._made is not None:
            self._bring_up_to_date()
        print(f"Training complete! Final step: {self.global_step}\nBest eval loss: {self.best_loss:.4f}", flush=True)
        return history

    def evaluate(self) -> dict[str, float]:
        """eval_loss: nats per label over the whole evaluation split."""
        if self._compiled is not None or self._own() is not None:
            return self.evaluate_on_host()
        return {"eval_loss": self.engine.evaluate()["loss"]}

    def save_checkpoint(self, path: str | pathlib.Path | None = None, loss: float | None = None) -> pathlib.Path:
        """Write a checkpoint folder as the original's: output_dir/checkpoint-STEP if no path is given."""
        from jaxtrain.train.checkpoint import torch_checkpoint

        folder = (
            pathlib.Path(self.config.training.output_dir) / f"checkpoint-{self.global_step}" if path is None else path
        )
        tree = self.host_tree() if self._compiled is not None else torch_checkpoint.of_program(self.engine.program)
        best = {} if math.isinf(self.best_loss) else {"loss": self.best_loss}
        meta = {"step": self.global_step, "epoch": self.epoch, "bad": self.patience_counter, "best_metrics": best}
        checkpoint_files.write_folder(pathlib.Path(folder), self.settings, tree, meta | {"metrics": {"loss": loss}})
        return pathlib.Path(folder)

    @staticmethod
    def find_lr(config: Config, min_lr: float = 1e-7, max_lr: float = 1.0, num_steps: int = 100) -> list[dict]:
        """[{"lr": ..., "loss": ...}]; the config and its weights stay as they are."""
        from jaxtrain.train.search.lr_range import range_test

        changed = copy.deepcopy(config)
        changed.training.max_steps, changed.training.num_epochs = num_steps, None
        changed.training.gradient_accumulation_steps, changed.training.log_to_wandb = 1, False
        found = range_test(Trainer(changed).engine.program, min_lr, max_lr, num_steps, clip=False)
        return [{"lr": lr, "loss": loss} for lr, loss in zip(found.lr, found.loss, strict=True)]

    # --- torch's objects -----------------------------------------------------------------------------------------

    def _own(self) -> str | None:
        """Why the engine's own loop would not do what this trainer would; None where it does."""
        if self._compiled is not None:
            return "steps were made by hand"
        for name in STEPS:
            if getattr(type(self), name) is not getattr(Trainer, name) or name in vars(self):
                return f"{type(self).__name__}.{name} is your own"
        return None if self._given is None else altered(self._given, self.config, self.settings)

    def _module(self) -> torch.nn.Module:
        if self._given is not None:
            return self._given
        if self._made is None:
            adapter = self.config.model.base_model_name is not None
            kind = torch_models.MemoryAdapter if adapter else torch_models.MemoryTransformer
            self._made, self._taken = kind(copy.deepcopy(self.config)), None
        return self._made

    def _optimizer(self) -> torch.optim.Optimizer:
        if self._torch_optimizer is None:
            training = self.config.training
            self._torch_optimizer = make_optimizer(self._module(), self.settings, training)
            options = {name: getattr(training, name) for name in SCHEDULE}
            factor = original_schedule(training.scheduler, self.total_steps, training.warmup_steps, **options)
            self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._torch_optimizer, factor)
            self._taken = None
        return self._torch_optimizer

    def _bring_up_to_date(self) -> None:
        """Put what the engine, or the compiled step, has trained into torch's objects."""
        if self._compiled is not None:
            self._compiled.sync()
            return
        from jaxtrain.train.checkpoint import torch_checkpoint

        program = self.engine.program
        now = (id(program.state), self._torch_optimizer is not None)
        if self._taken == now:
            return
        self._taken = now
        self._module().load_state_dict(program_state(self.engine))
        if self._torch_optimizer is not None and int(program.state.updates):
            tree = torch_checkpoint.of_program(program)
            place_optimizer(self._torch_optimizer, self._module(), tree["optimizer"])
            self._scheduler.last_epoch = int(program.state.updates)
            self._scheduler._last_lr = [group["lr"] for group in self._torch_optimizer.param_groups]


class Follower:
    """Keeps the trainer's counters true while the engine runs."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_start(self, engine: Any) -> None:
        self.trainer.global_step = int(engine.state.step)

    def on_step_end(self, engine: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.trainer.global_step, self.trainer.epoch = step, step // engine.steps_per_epoch

    def on_evaluation_end(self, engine: Any, step: int, metrics: Mapping[str, float]) -> None:
        trainer, loss = self.trainer, metrics["loss"]
        trainer.check_early_stopping(loss)
        print(f"Step {step}: eval_loss = {loss:.4f}", flush=True)

    def state_dict(self) -> dict[str, Any]:
        best = self.trainer.best_loss
        return {"best_loss": None if math.isinf(best) else best, "patience_counter": self.trainer.patience_counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best = state["best_loss"]
        self.trainer.best_loss = math.inf if best is None else best
        self.trainer.patience_counter = state["patience_counter"]


def converted(config: Config) -> dict[str, Any]:
    """This project's settings, before they are checked."""
    import dataclasses

    from jaxtrain.systems.memory_lm.original import legacy_config

    return legacy_config.convert(dataclasses.asdict(config))


def program_state(engine: Any) -> dict[str, np.ndarray]:
    return engine.state_dict()


def check(training: TrainingConfig) -> None:
    """Raise UserError, a ValueError, for settings that no run can have."""
    if training.resume_from_checkpoint and training.init_from_checkpoint:
        raise UserError("training: resume_from_checkpoint and init_from_checkpoint exclude each other; give one")
    positive = ("batch_size", "gradient_accumulation_steps", "max_steps", "num_epochs", "eval_steps", "save_steps")
    for name in (*positive, "logging_steps", "num_gpus", "save_total_limit"):
        value = getattr(training, name)
        if value is not None and value <= 0:
            raise UserError(f"training.{name}: {value}, wanted more than 0")
    for name in ("warmup_steps", "max_grad_norm"):
        if getattr(training, name) < 0:
            raise UserError(f"training.{name}: {getattr(training, name)}, wanted 0 or more")
    if training.early_stopping and training.early_stopping_patience <= 0:
        raise UserError(f"training.early_stopping_patience: {training.early_stopping_patience}, wanted more than 0")


def make_optimizer(model: torch.nn.Module, settings: Any, training: TrainingConfig) -> torch.optim.Optimizer:
    """The original's optimizer: one group per part in its order, each with its name and rate.

    Raises UserError, a ValueError, where nothing is trained.
    """
    from jaxtrain.systems.memory_lm.param_groups import param_group

    members: dict[str, list] = {name: [] for name in checkpoint_files.GROUPS}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[param_group(key, settings)].append(parameter)
    rates = {name: group.lr for name, group in settings.optim.groups.items()}
    groups = [{"params": params, "lr": rates[name], "name": name} for name, params in members.items() if params]
    if not groups:
        raise UserError("nothing to train: every parameter is frozen")
    optim = settings.optim
    adam = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps, "weight_decay": optim.weight_decay}
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, **adam)
    if training.optimizer == "adam":
        return torch.optim.Adam(groups, **adam)
    return torch.optim.SGD(groups, lr=groups[0]["lr"], momentum=0.9, weight_decay=optim.weight_decay)


def place_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Put a training state's moments and rates into torch's optimizer, by the parameters' names."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for group in saved["param_groups"]:
        name = str(group["name"]).removesuffix(" without decay")
        for mine in optimizer.param_groups:
            if mine["name"] == name:
                mine["lr"] = group["lr"]
        for number, key in zip(group["params"], group["param_names"], strict=True):
            if number in saved["state"]:
                entry = {field: torch_models.as_tensor(value) for field, value in saved["state"][number].items()}
                optimizer.state[own[key]] = entry


def altered(model: torch.nn.Module, config: Config, settings: Any) -> str | None:
    """Name what makes a module another one than its config describes; None for the original's own."""
    from jaxtrain.systems.memory_lm.param_groups import trainable

    kinds = (torch_models.MemoryTransformer, torch_models.MemoryAdapter)
    if type(model) not in kinds:
        return f"the model is a {type(model).__name__}"
    if "forward" in vars(model) or any(inner._forward_hooks or inner._forward_pre_hooks for inner in model.modules()):
        return "the model has hooks or a forward of its own"
    own = {inspect.getfile(kind) for kind in (torch_models.MemoryTransformer, *kinds[1].__mro__[1:3])}
    foreign = [
        type(x).__name__ for x in model.modules() if type(x).__module__.split(".")[0] not in ("torch", "jaxtrain")
    ]
    if foreign and own:
        return f"it holds a {foreign[0]}"
    for key, parameter in model.named_parameters():
        if parameter.requires_grad != trainable(key, settings):
            return f"requires_grad of {key} was changed"
    return None
