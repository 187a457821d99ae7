"""The original's Trainer with its config, attributes, methods and files, run by this project's engine.

The engine runs one compiled program, sharded and resumable. If you override a step of the loop or change the model, the
loop runs in Python instead, with one compiled call per batch, and a printed line says so.
"""

import copy
import dataclasses
import math
import pathlib
import random
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original import checkpoint_files, datasets, run_folders, torch_models
from jaxtrain.systems.memory_lm.original.host_loop import HostLoop
from jaxtrain.systems.memory_lm.original.optimizers import make_optimizer, place_optimizer
from jaxtrain.systems.memory_lm.original.schedules import original_schedule
from jaxtrain.systems.memory_lm.original.torch_models import Config, checked
from jaxtrain.systems.memory_lm.original.trainer_checks import altered, check, on_present_devices
from torch_bridge.datasets import to_numpy
from torch_bridge.optimizers import own_step
from torch_bridge.torch_step import clipping_is_replaced, replaced_forward

STEPS = (
    "training_step",
    "compute_loss",
    "train_epoch",
    "log_metrics",
    "evaluate",
    "save_checkpoint",
    "check_early_stopping",
    "_check_early_stopping",
    "_create_optimizer",
    "_create_scheduler",
)
SCHEDULE = (
    "warmup_ratio",
    "min_lr_ratio",
    "decay_start_step",
    "decay_start_ratio",
    "wsd_stable_steps",
    "wsd_stable_ratio",
)


class Trainer(HostLoop):
    """Trainer of a config from load_config. model: a MemoryTransformer or MemoryAdapter (or a subclass) to start from;
    it receives the trained weights; None creates one. changes: sections of this project's config that override it.

    Attributes, always current: model, optimizer, scheduler (lr_scheduler), global_step, epoch, best_loss,
    patience_counter, should_stop, total_steps, train_dataloader (train_loader), eval_dataloader (val_loader),
    tokenizer, device, config. Results are written to training.output_dir: the original's checkpoint-STEP, best_model
    and final_model, and a run folder of this project. Raises UserError, a ValueError, for settings out of range.
    """

    def __init__(self, config: Config, model: torch.nn.Module | None = None, **changes: Any):
        from jaxtrain.task import find_task
        from jaxtrain.train.trainer import Trainer as Engine

        check(config.training)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(42)
        super().__init__()
        self.config, self._given = config, model
        self._fit_vocabulary()
        self._resume, changes = self._origin(changes)
        self._started = False  # the checkpoint of init_from has been loaded
        self.settings = checked(on_present_devices(config), **changes)
        self.output_dir, self._claimed = pathlib.Path(self.settings.run.dir).expanduser(), False
        self.global_step = self.epoch = self.patience_counter = 0
        self.best_loss, self.should_stop = math.inf, False
        if self._resume == "auto" and config.training.resume_from_checkpoint is not None:
            vars(self).update(run_folders.counters(config.training.resume_from_checkpoint))
        self._newest: Mapping[str, Any] | None = None  # the engine's metrics of the last update
        self._best_step: int | None = None  # step of the best evaluation
        task = dataclasses.replace(find_task(self.settings.task), build_data=datasets.build_data)
        if task.twin is not None:
            task = dataclasses.replace(task, twin=dataclasses.replace(task.twin, checkpoint=self._write_files))
        self.engine = Engine(config=self.settings, task=task, callbacks=[Follower(self)])
        self.total_steps = self.engine.total_steps
        if model is not None:
            self.engine.program.load_state_dict(to_numpy(model.state_dict()))  # before what init_from loads

    def _fit_vocabulary(self) -> None:
        """Set model.vocab_size to the tokenizer's size, with a warning, for a model created from scratch."""
        section = self.config.model
        if self._given is not None or section.base_model_name is not None or section.tokenizer_name is None:
            return
        size = len(self.tokenizer)
        if section.vocab_size != size:
            warnings.warn(f"model.vocab_size: {section.vocab_size} becomes {size}, the tokenizer's", stacklevel=3)
            section.vocab_size = size

    def _origin(self, changes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the engine's `resume` argument and the settings for resuming."""
        training = self.config.training
        own = converted(self.config)
        wanted = {"checkpoint": {**own["checkpoint"], "torch": "original"}}
        wanted["evaluation"] = {**own["evaluation"], "patience": None}  # check_early_stopping decides instead
        if training.resume_from_checkpoint is None:
            return "auto", {**wanted, **changes}
        source = pathlib.Path(training.resume_from_checkpoint).expanduser()
        if not (source / "trainer_state.json").is_file():  # a run folder of this project
            return str(source), {**wanted, "init_from": None, **changes}
        return "auto", {**wanted, **changes}

    def _claim_folder(self) -> None:
        """Claim a new run folder, unless this was done or output_dir itself is the run to resume."""
        output = self.output_dir
        if (
            self._claimed
            or self._resume != "auto"
            and pathlib.Path(self._resume).expanduser().resolve() == output.resolve()
        ):
            return
        self._claimed = True
        source, first, numbered = self.config.training.resume_from_checkpoint, output, output / "run"
        if source is not None and self._resume == "auto" and run_folders.parent(source) == output.resolve():
            first = numbered = output / f"resumed-{pathlib.Path(source).name.removeprefix('checkpoint-')}"
        run_folders.claim(self.engine, first, numbered)

    def _start(self) -> None:
        """Load the checkpoint of resume_from_checkpoint or init_from_checkpoint, unless a run has loaded it."""
        if self._started or self._claimed or self.settings.init_from is None:
            return
        from jaxtrain.train.checkpoint import init_from

        self._started = True
        init_from.apply(self.engine.program, self.settings.init_from)

    def _write_files(self, config: Any, tree: Mapping[str, Any], run: pathlib.Path, meta: Mapping[str, Any]) -> None:
        """Write the original's files to output_dir, even if the engine's run folder is elsewhere."""
        ended = -(-meta["step"] // meta["steps_per_epoch"]) if meta["final"] else self.epoch
        loss = None if self._newest is None else float(self._newest["loss"])
        best = self.config.training.save_best_model and meta["step"] == self._best_step
        own = self._progress(loss) | {"epoch": ended, "best": best}
        checkpoint_files.write(config, tree, self.output_dir, {**meta, **own})

    def _progress(self, loss: float | None) -> dict[str, Any]:
        """Return the `meta` that checkpoint_files.write_folder takes."""
        best = {} if math.isinf(self.best_loss) else {"loss": self.best_loss}
        found = {"step": self.global_step, "epoch": self.epoch, "bad": self.patience_counter, "best_metrics": best}
        return found | {"metrics": {"loss": loss}, "sections": dataclasses.asdict(self.config)}

    # --- what a run is made of -----------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """Return the torch model with the current weights."""
        model = self._module()
        self._bring_up_to_date()
        return model

    @model.setter
    def model(self, model: torch.nn.Module) -> None:
        raise UserError(
            "Trainer.model: optimizer and scheduler are made for this model; pass Trainer(config, model=...)"
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the torch optimizer with the current state; each part of the model is a group with its own rate."""
        optimizer = self._optimizer()
        self._bring_up_to_date()
        return optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set an optimizer over this model's parameters; the scheduler keeps the previous one until you replace it."""
        own, given = set(self._module().parameters()), {p for group in optimizer.param_groups for p in group["params"]}
        if not given <= own:
            raise UserError("Trainer.optimizer: it holds parameters that are not trainer.model's; make it of those")
        self._put_back()
        self._optimizer()
        self._torch_optimizer = optimizer
        self._replaced.add("optimizer")

    @property
    def scheduler(self) -> Any:
        """Return the torch scheduler with the current state."""
        self._optimizer()
        self._bring_up_to_date()
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UserError(
                "Trainer.scheduler: it is stepped once an update, without a metric; take one that needs none"
            )
        self._optimizer()
        self._scheduler = scheduler
        self._replaced.add("scheduler")

    lr_scheduler = scheduler

    @property
    def device(self) -> torch.device:
        return next(self._module().parameters()).device

    # --- aliases: other trainers' names ----------------------------------------------------------------------------

    train_config = property(lambda self: self.config.training)
    current_epoch = property(lambda self: self.epoch)
    best_val_loss = property(lambda self: self.best_loss)
    epochs_without_improvement = property(lambda self: self.patience_counter)
    steps_per_epoch = property(lambda self: self.engine.steps_per_epoch)
    accumulation_steps = property(lambda self: self.config.training.gradient_accumulation_steps)
    clip_grad = property(lambda self: self.config.training.max_grad_norm)
    use_amp = property(lambda self: self.config.training.mixed_precision != "no")

    # --- the run -------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end; return best_val_loss, train_history and val_history."""
        reason = self._own()
        if reason is not None and self._resume != "auto":
            raise UserError(
                f"training.resume_from_checkpoint: {self._resume} is a run folder, and the loop on the host ({reason}) "
                "goes on from a checkpoint-STEP folder alone"
            )
        if reason is not None:
            print(f"the loop runs on the host, one compiled call per batch: {reason}", flush=True)
            return self.train_on_host()
        self._claim_folder()
        history = self.engine.train(resume=self._resume)
        if self._given is not None or self._made is not None:
            self._bring_up_to_date()
        print(f"Training complete! Final step: {self.global_step}\nBest eval loss: {self.best_loss:.4f}", flush=True)
        return history

    def evaluate(self) -> dict[str, float]:
        """Return eval_loss in nats per label over the whole evaluation split."""
        if self._own() is not None:
            return self.evaluate_on_host()
        self._start()
        return {"eval_loss": self.engine.evaluate()["loss"]}

    def save_checkpoint(self, path: str | pathlib.Path | None = None, loss: float | None = None) -> pathlib.Path:
        """Write an original checkpoint folder, output_dir/checkpoint-STEP by default; return its path."""
        from jaxtrain.train.checkpoint import torch_checkpoint

        folder = self.output_dir / f"checkpoint-{self.global_step}" if path is None else path
        self._start()
        tree = self.host_tree() if self._own() is not None else torch_checkpoint.of_program(self.engine.program)
        checkpoint_files.write_folder(pathlib.Path(folder), self.settings, tree, self._progress(loss))
        return pathlib.Path(folder)

    @staticmethod
    def find_lr(config: Config, min_lr: float = 1e-7, max_lr: float = 1.0, num_steps: int = 100) -> list[dict]:
        """Run a learning-rate range test; return [{"lr": ..., "loss": ...}]. The config is not changed."""
        from jaxtrain.train.search.lr_range import range_test

        changed = copy.deepcopy(config)
        changed.training.max_steps, changed.training.num_epochs = num_steps, None
        changed.training.gradient_accumulation_steps, changed.training.log_to_wandb = 1, False
        found = range_test(Trainer(changed).engine.program, min_lr, max_lr, num_steps, clip=False)
        return [{"lr": lr, "loss": loss} for lr, loss in zip(found.lr, found.loss, strict=True)]

    # --- torch's objects -----------------------------------------------------------------------------------------

    def _own(self) -> str | None:
        """Return the reason why the loop must run in Python instead of the engine; None if there is none."""
        if self._on_host:
            return "steps were made by hand"
        for name in STEPS:
            if getattr(type(self), name) is not OWN_STEPS[name] or name in vars(self):
                return f"{type(self).__name__}.{name} is your own"
        if self._replaced:
            return f"{type(self).__name__}.{min(self._replaced)} is your own"
        if self._torch_optimizer is not None and own_step(self._torch_optimizer):
            return own_step(self._torch_optimizer)
        module = self._made if self._given is None else self._given
        if module is not None and (forward := replaced_forward(module)):
            return f"the forward of {forward} was replaced"
        if clipping_is_replaced():
            return "torch.nn.utils.clip_grad_norm_ is your own"
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
            self._torch_optimizer = self._create_optimizer()
            self._scheduler = self._create_scheduler()
            self._taken = None
        return self._torch_optimizer

    def _create_optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer for the model."""
        return make_optimizer(self._module(), self.settings, self.config.training)

    def _create_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a new scheduler for the trainer's optimizer."""
        training = self.config.training
        options = {name: getattr(training, name) for name in SCHEDULE}
        factor = original_schedule(training.scheduler, self.total_steps, training.warmup_steps, **options)
        return torch.optim.lr_scheduler.LambdaLR(self._torch_optimizer or self._optimizer(), factor)

    def _put_back(self) -> None:
        """Write the compiled step's state to the torch objects and drop the step; the next one uses the new parts."""
        if self._compiled is not None:
            self._compiled.sync()
            self._compiled = None

    def _bring_up_to_date(self) -> None:
        """Write the state of the engine, or of the compiled step, to the torch objects."""
        if self._compiled is not None:
            self._compiled.sync()
        if self._on_host:
            return
        from jaxtrain.train.checkpoint import torch_checkpoint

        self._start()

        program = self.engine.program
        if self._taken is not None and self._taken() is program.state:
            return
        self._taken = weakref.ref(program.state)  # not its id: a later state may have the same one
        self._module().load_state_dict(program_state(self.engine))
        if self._torch_optimizer is None or not int(program.state.updates):
            return
        if "optimizer" not in self._replaced:
            tree = torch_checkpoint.of_program(program)
            place_optimizer(self._torch_optimizer, self._module(), tree["optimizer"])
        if "scheduler" not in self._replaced:
            self._scheduler.last_epoch = int(program.state.updates)
            self._scheduler._last_lr = [group["lr"] for group in self._scheduler.optimizer.param_groups]


class Follower:
    """Callback that keeps the trainer's counters current while the engine runs."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_start(self, engine: Any) -> None:
        step = self.trainer.global_step = int(engine.state.step)
        self.trainer.epoch = step // engine.steps_per_epoch

    def on_step_end(self, engine: Any, step: int, metrics: Mapping[str, float]) -> None:
        trainer = self.trainer
        trainer.global_step, trainer.epoch, trainer._newest = step, (step - 1) // engine.steps_per_epoch, metrics

    def on_evaluation_end(self, engine: Any, step: int, metrics: Mapping[str, float]) -> None:
        trainer, loss = self.trainer, metrics["loss"]
        every = trainer.settings.evaluation.every_steps
        if every is not None and step % every:
            return  # the engine's extra evaluation at the end of a run
        trainer._best_step = step if loss < trainer.best_loss else trainer._best_step
        print(f"Step {step}: eval_loss = {loss:.4f}", flush=True)
        trainer.should_stop = trainer.check_early_stopping(loss)
        if trainer.should_stop:
            engine.run.stop()

    def on_train_end(self, engine: Any) -> None:
        self.trainer.epoch = -(
            -self.trainer.global_step // engine.steps_per_epoch
        )  # rounded up: counts an unfinished epoch

    def state_dict(self) -> dict[str, Any]:
        best = self.trainer.best_loss
        return {"best_loss": None if math.isinf(best) else best, "patience_counter": self.trainer.patience_counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best = state["best_loss"]
        self.trainer.best_loss = math.inf if best is None else best
        self.trainer.patience_counter = state["patience_counter"]


OWN_STEPS = {name: getattr(Trainer, name) for name in STEPS}  # before a test patches the class


def converted(config: Config) -> dict[str, Any]:
    """Return this project's settings before validation."""
    from jaxtrain.systems.memory_lm.original import legacy_config

    return legacy_config.convert(dataclasses.asdict(config))


def program_state(engine: Any) -> dict[str, np.ndarray]:
    return engine.state_dict()
