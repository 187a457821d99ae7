"""The original's Trainer with its config, attributes, methods and files: a loop in Python, a compiled call a batch."""

import copy
import dataclasses
import functools
import itertools
import math
import pathlib
import random
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from jaxtrain.compat.synced_objects import SyncedObjects, check_shard
from jaxtrain.compiled_step.or_torch import StepOrTorch
from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import data
from jaxtrain.systems.memory_lm.original import checkpoint_files, resuming
from jaxtrain.systems.memory_lm.original.datasets import create_dataloader
from jaxtrain.systems.memory_lm.original.optimizers import make_optimizer
from jaxtrain.systems.memory_lm.original.range_test import range_test
from jaxtrain.systems.memory_lm.original.schedules import training_schedule
from jaxtrain.systems.memory_lm.original.torch_models import Config, MemoryAdapter, MemoryTransformer, checked
from jaxtrain.systems.memory_lm.original.trainer_checks import check, on_present_devices
from jaxtrain.systems.memory_lm.tokenizers import ByteTokenizer
from torch_bridge.datasets import to_numpy

SEED = 42


def _loss(compute_loss: Callable, training: Any, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]):
    """Not a method: names such as `device` in a forward would lead the compiled step to all that the trainer reads."""
    loss, values = compute_loss(model, batch)
    return loss / training.gradient_accumulation_steps, {"loss": loss, **values}


class Trainer(SyncedObjects):
    """Trainer of a config from load_config. model: a MemoryTransformer or MemoryAdapter (or a subclass) to start from;
    it receives the trained weights; None creates one.

    Attributes, always current: model, optimizer, scheduler (lr_scheduler), global_step, epoch, best_loss,
    patience_counter, should_stop, total_steps, train_dataloader (train_loader), eval_dataloader (val_loader),
    tokenizer, device, config. Every method of the loop may be overridden or called by itself. Writes the original's
    checkpoint-STEP, best_model and final_model to training.output_dir. Raises UserError, a ValueError, for settings out
    of range.
    """

    def __init__(self, config: Config, model: torch.nn.Module | None = None):
        check(config.training)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(SEED)
        self.config = config
        self._loaders: dict[str, Any] = {}
        self._order = torch.Generator()  # of the rows: a function of seed and epoch, so that a resumed run repeats it
        self.settings = checked(on_present_devices(config))
        check_shard(self.settings.shard, "training.distributed_strategy")
        self._fit_vocabulary(model)
        self.is_main_process = jax.process_index() == 0
        self.output_dir = pathlib.Path(config.training.output_dir).expanduser()
        self.global_step = self.epoch = self.patience_counter = 0
        self.best_loss, self.should_stop = math.inf, False
        self.history: dict[str, list[dict[str, float]]] = {"train_history": [], "val_history": []}
        kind = MemoryTransformer if config.model.base_model_name is None else MemoryAdapter
        self._model = kind(copy.deepcopy(config)) if model is None else model
        training, rows = config.training, len(self.train_dataloader)
        if training.gradient_checkpointing and hasattr(self._model, "gradient_checkpointing_enable"):
            self._model.gradient_checkpointing_enable()
        self.steps_per_epoch = max(1, -(-rows // training.gradient_accumulation_steps))
        epochs = training.num_epochs
        self.total_steps = training.max_steps if epochs is None else epochs * self.steps_per_epoch
        self._optimizer = self._create_optimizer()
        self._scheduler = self._create_scheduler()
        self._batches_done = 0  # of the first epoch, before the checkpoint that this run resumes from
        self._last_loss: Any = None  # of the last update
        self._wandb: Any = None
        for path, resumes in ((training.init_from_checkpoint, False), (training.resume_from_checkpoint, True)):
            if path is not None:
                self._load(pathlib.Path(path).expanduser(), resumes)

    def _fit_vocabulary(self, model: torch.nn.Module | None) -> None:
        """Set model.vocab_size to the tokenizer's size, with a warning, for a model created from scratch.

        Raises UserError for a model whose embedding is smaller than the tokenizer.
        """
        section = self.config.model
        size, entries = data.tokenizer_of(self.settings).vocab_size, data.vocabulary(self.settings)
        scratch = model is None and section.base_model_name is None and section.tokenizer_name is not None
        if scratch and section.vocab_size != size:
            warnings.warn(f"model.vocab_size: {section.vocab_size} becomes {size}, the tokenizer's", stacklevel=3)
            section.vocab_size = size
            self.settings = checked(on_present_devices(self.config))
        elif size > entries:
            raise UserError(f"model.vocab_size: {entries}, but the tokenizer has {size} entries; set vocab_size={size}")

    def _load(self, path: pathlib.Path, resumes: bool) -> None:
        saved = resuming.open_checkpoint(path, resumes)
        resuming.load_weights(self._model, saved)
        if not resumes:
            return
        vars(self).update(resuming.counters(saved.source))
        if saved.optimizer is not None:
            resuming.load_moments(self._optimizer, saved.optimizer)
        self._scheduler.last_epoch = self.global_step  # step() would warn that no update came before it
        rates = zip(self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
        self._scheduler._last_lr = [base * factor(self.global_step) for base, factor in rates]
        for group, rate in zip(self._optimizer.param_groups, self._scheduler._last_lr, strict=True):
            group["lr"] = rate
        steps = max(0, self.global_step - self.epoch * self.steps_per_epoch)
        self._batches_done = steps * self.accumulation_steps
        print(f"went on from {saved.source} at step {self.global_step} of {self.total_steps}", flush=True)

    # --- aliases: other trainers' names ----------------------------------------------------------------------------

    train_config = property(lambda self: self.config.training)
    current_epoch = property(lambda self: self.epoch)
    best_val_loss = property(lambda self: self.best_loss)
    epochs_without_improvement = property(lambda self: self.patience_counter)
    accumulation_steps = property(lambda self: self.config.training.gradient_accumulation_steps)
    clip_grad = property(lambda self: self.config.training.max_grad_norm)
    use_amp = property(lambda self: self.config.training.mixed_precision != "no")
    device = property(lambda self: next(self._model.parameters()).device)

    # --- what a run is made of -----------------------------------------------------------------------------------

    model = property(SyncedObjects.model.fget, doc="The torch model with the current weights.")

    @model.setter
    def model(self, model: torch.nn.Module) -> None:
        raise UserError("Trainer.model: the optimizer is made for this model; pass Trainer(config, model=...)")

    optimizer = property(SyncedObjects.optimizer.fget, doc="The torch optimizer with the current state.")

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set an optimizer over this model's parameters; the scheduler keeps the previous one until you replace it."""
        members = {p for group in optimizer.param_groups for p in group["params"]}
        if not members <= set(self._model.parameters()):
            raise UserError("Trainer.optimizer: it holds parameters that are not trainer.model's; make it of those")
        self._forget_step()
        self._optimizer = optimizer

    @property
    def scheduler(self) -> Any:
        """The torch scheduler, stepped once an update."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UserError(
                "Trainer.scheduler: it is stepped once an update, without a metric; take one that needs none"
            )
        self._scheduler = scheduler

    lr_scheduler = scheduler

    def _create_optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer for the model, with a group and a rate for each part of it."""
        return make_optimizer(self._model, self.settings, self.config.training)

    def _create_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a new scheduler for the trainer's optimizer."""
        factor = training_schedule(self.config.training, self.total_steps)
        return torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)

    # --- data ----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The config's tokenizer, with the config's special ids; its default padding token is its end token."""
        if "tokenizer" not in self._loaders:
            wrapped = data.tokenizer_of(self.settings)
            if isinstance(wrapped, ByteTokenizer):
                print("tokens are bytes; set model.tokenizer_name for the one that the original loads", flush=True)
            self._loaders["tokenizer"] = inner = getattr(wrapped, "inner", wrapped)
            if inner.pad_token_id is None:
                inner.pad_token = inner.eos_token
        return self._loaders["tokenizer"]

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._loaders["tokenizer"] = tokenizer

    def _loader(self, split: str) -> Any:
        if split not in self._loaders:
            training, train = self.config.training, split == "train"
            self._loaders[split] = create_dataloader(
                training.dataset_name,
                self.tokenizer,
                training.batch_size * self.settings.shard.devices,
                training.max_length,
                training.dataset_split if train else training.eval_split,
                training.dataset_subset,
                training.text_field,
                training.training_mode,
                num_workers=0,
                shuffle=train,
                drop_last=train,
                generator=self._order if train else None,
            )
        return self._loaders[split]

    def _set_loader(self, split: str, loader: Any) -> None:
        self._loaders[split] = loader

    train_dataloader = property(
        lambda self: self._loader("train"),
        lambda self, loader: self._set_loader("train", loader),
        doc="A shuffled torch DataLoader of the training split.",
    )
    eval_dataloader = property(
        lambda self: self._loader("eval"),
        lambda self, loader: self._set_loader("eval", loader),
        doc="A torch DataLoader of the evaluation split, not shuffled.",
    )
    train_loader, val_loader = train_dataloader, eval_dataloader

    # --- the loop ------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end; return best_val_loss, train_history and val_history."""
        training = self.config.training
        if training.log_to_wandb:
            import wandb

            name, sections = training.wandb_run_name, dataclasses.asdict(self.config)
            self._wandb = wandb.init(project=training.wandb_project, name=name, config=sections)
        over = self.global_step >= self.total_steps
        while not over:
            over = self.train_epoch()
            self.epoch += 1
        self.save_checkpoint(self.output_dir / "final_model", self._newest_loss())
        print(f"Training complete! Final step: {self.global_step}\nBest eval loss: {self.best_loss:.4f}", flush=True)
        if self._wandb is not None:
            self._wandb.finish()
        return {"best_val_loss": self.best_loss, **self.history}

    def train_epoch(self) -> bool:
        """Run one pass over the training data; return True if the run is finished.

        Raises UserError if the training data has fewer rows than a batch.
        """
        training, loader = self.config.training, self.train_dataloader
        count, began = len(loader), time.perf_counter()
        if not count:
            raise UserError(f"the training data has fewer rows than training.batch_size={training.batch_size}")
        self._order.manual_seed(SEED + self.epoch)
        done, self._batches_done = self._batches_done, 0
        for number, batch in enumerate(itertools.islice(loader, done, None), done + 1):
            update = number % training.gradient_accumulation_steps == 0 or number == count
            values = self.training_step(batch, update)
            if not update:
                continue
            self._last_loss = values["loss"]
            if self.global_step == 1 or self.global_step % training.logging_steps == 0:
                rate = self._optimizer.param_groups[0]["lr"]
                seconds, began = time.perf_counter() - began, time.perf_counter()
                shown = {f"train/{name}": float(value) for name, value in values.items()}
                self.history["train_history"].append({"step": self.global_step, "loss": float(values["loss"])})
                self.log_metrics(shown | {"train/learning_rate": rate, "train/step_time_s": seconds}, self.global_step)
            if self.global_step % training.eval_steps == 0 and self._evaluated():
                return True
            if self.global_step % training.save_steps == 0:
                self.save_checkpoint(loss=self._newest_loss())
                if self.is_main_process and training.save_total_limit is not None:
                    checkpoint_files.delete_old(self.output_dir, training.save_total_limit)
            if self.global_step >= self.total_steps:
                break
        return self.global_step >= self.total_steps

    def training_step(self, batch: Mapping[str, torch.Tensor], update: bool = True) -> dict[str, Any]:
        """Run forward and backward, and with `update` clipping, optimizer and scheduler; return values to log.

        The values are computed asynchronously: reading one waits for it. Without `update` the gradients are accumulated
        for the next call; the loss is divided by gradient_accumulation_steps.
        """
        step = self._step()
        self._model.train()
        _, values = step(dict(batch), update=update)
        if update:
            self._scheduler.step()
            self.global_step += 1
        return values

    @staticmethod
    def compute_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        """Return the loss of a batch and values to log. Written in torch, but captured once and compiled."""
        out = model(**batch)
        terms = [one for one in out["router_losses"] if one]
        router = model._aggregate_router_losses(terms) if terms else torch.zeros(())
        return out["loss"], {"router_aux_loss": router}

    def _evaluated(self) -> bool:
        loss = self.evaluate()["eval_loss"]
        self.history["val_history"].append({"step": self.global_step, "loss": loss})
        self.log_metrics({"eval/loss": loss}, self.global_step)
        print(f"Step {self.global_step}: eval_loss = {loss:.4f}", flush=True)
        best = loss < self.best_loss
        self.should_stop = self.check_early_stopping(loss)
        if best and self.config.training.save_best_model:
            self.save_checkpoint(self.output_dir / "best_model", loss)
            self.save_checkpoint(loss=loss)
        return self.should_stop

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return eval_loss in nats per label over the whole evaluation split."""
        model, total, count = self._model, 0.0, 0
        training = model.training
        model.eval()
        forward = self._step().forward
        for batch in self.eval_dataloader:
            logits = forward(batch["input_ids"], batch["attention_mask"])["logits"]
            labels = batch["labels"][:, 1:]
            nll = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            total, count = total + float(nll), count + int((labels != -100).sum())
        model.train(training)
        return {"eval_loss": total / count if count else math.nan}

    def check_early_stopping(self, eval_loss: float) -> bool:
        """Update best_loss and patience_counter with an evaluation; return True if the run should stop."""
        stop = self._check_early_stopping(eval_loss)
        self.best_loss = min(self.best_loss, eval_loss) if not math.isnan(eval_loss) else self.best_loss
        return stop

    def _check_early_stopping(self, eval_loss: float) -> bool:
        """Update patience_counter, but not best_loss, with an evaluation; return True if the run should stop."""
        training = self.config.training
        better = self.best_loss - eval_loss > training.early_stopping_threshold
        self.patience_counter = 0 if better else self.patience_counter + 1
        return training.early_stopping and self.patience_counter >= training.early_stopping_patience

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Print values, and log them to W&B with training.log_to_wandb; override it to send them elsewhere."""
        print(f"step {step}/{self.total_steps} {' '.join(f'{n}={v:.4g}' for n, v in values.items())}", flush=True)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def save_checkpoint(self, path: str | pathlib.Path | None = None, loss: float | None = None) -> pathlib.Path:
        """Write an original checkpoint folder, output_dir/checkpoint-STEP by default; return its path."""
        folder = pathlib.Path(self.output_dir / f"checkpoint-{self.global_step}" if path is None else path)
        self._sync()
        arrays: dict[int, Any] = {}  # by address, so that a tied weight stays one object
        tree = {
            "model": {k: arrays.setdefault(x.data_ptr(), to_numpy(x)) for k, x in self._model.state_dict().items()},
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
        }
        progress = {"step": self.global_step, "epoch": self.epoch, "bad": self.patience_counter}
        progress |= {"best_metrics": {} if math.isinf(self.best_loss) else {"loss": self.best_loss}}
        progress |= {"metrics": {"loss": loss}, "sections": dataclasses.asdict(self.config)}
        if self.is_main_process:
            checkpoint_files.write_folder(folder, self.settings, tree, progress)
        return folder

    def _newest_loss(self) -> float | None:
        return None if self._last_loss is None else float(self._last_loss)

    @staticmethod
    def find_lr(config: Config, min_lr: float = 1e-7, max_lr: float = 1.0, num_steps: int = 100) -> list[dict]:
        """Run a learning-rate range test; return [{"lr": ..., "loss": ...}]. The config is not changed.

        Ends early when a loss is not finite, or exceeds four times the largest of the first three. Raises UserError for
        an empty range. Source: Smith 2017, "Cyclical learning rates for training neural networks", sec. 3.3.
        """
        changed = copy.deepcopy(config)
        changed.training.max_steps, changed.training.num_epochs = num_steps, None
        changed.training.gradient_accumulation_steps, changed.training.max_grad_norm = 1, 0.0
        trainer = Trainer(changed)
        batches = itertools.islice(itertools.cycle(trainer.train_dataloader), num_steps)
        step = lambda batch: float(trainer._step()(dict(batch), update=True)[1]["loss"])
        return range_test(step, trainer._optimizer, batches, min_lr, max_lr, num_steps)

    # --- the compiled step ---------------------------------------------------------------------------------------

    def _step_parts(self) -> tuple:
        training = self.config.training
        numbers = (training.gradient_accumulation_steps, training.max_grad_norm, training.mixed_precision)
        return self._model, self._optimizer, self.compute_loss, *numbers

    def _new_step(self) -> StepOrTorch:
        training = self.config.training
        if training.mixed_precision == "fp16":
            print("training.mixed_precision fp16: computed in bfloat16, which needs no loss scale", flush=True)
        step = StepOrTorch(
            self._model,
            functools.partial(_loss, self.compute_loss, training),
            self._optimizer,
            precision="fp32" if training.mixed_precision == "no" else "bf16",
            clip_norm=training.max_grad_norm or None,
            shard=self.settings.shard.model_dump(),
            say=lambda line: print(line, flush=True),
        )
        if step.compiled is not None:  # a resumed run draws the dropout of an uninterrupted one
            step.compiled.count = self.epoch * len(self.train_dataloader) + self._batches_done
        return step
