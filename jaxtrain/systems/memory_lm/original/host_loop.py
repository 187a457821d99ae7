"""The Trainer's loop in Python, for users who override its steps: one compiled call per batch (jaxtrain.compile).

If a model or loss cannot be compiled, torch runs the step and a printed line says why.
"""

import functools
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jaxtrain.compiled_step.or_torch import StepOrTorch
from jaxtrain.errors import UserError
from torch_bridge.datasets import to_numpy

PRECISIONS = {"no": "fp32", "bf16": "bf16"}


def _loss(compute_loss: Callable, training: Any, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]):
    """Not a method: names such as `device` in a forward would lead the compiled step to all that the trainer reads."""
    loss, values = compute_loss(model, batch)
    return loss / training.gradient_accumulation_steps, {"loss": loss, **values}


class HostLoop:
    """Base of Trainer: its data, and the steps of the loop as methods to call, override and extend with super()."""

    config: Any
    settings: Any
    output_dir: pathlib.Path
    global_step: int
    epoch: int
    best_loss: float
    patience_counter: int
    should_stop: bool  # early stopping has ended the run
    total_steps: int

    def __init__(self) -> None:
        self._compiled: StepOrTorch | None = None
        self._torch_optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._made: torch.nn.Module | None = None
        self._taken: Any = None  # weak reference to the state that the torch objects hold
        self._loaders: dict[str, Any] = {}
        self._replaced: set[str] = set()  # parts that the user has replaced and the engine does not know
        self._on_host = False  # steps were made by this loop, so the engine's state is outdated

    # --- data ----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """Return the config's tokenizer with the config's special ids; its default padding token is its end token."""
        if "tokenizer" not in self._loaders:
            from jaxtrain.systems.memory_lm import data
            from jaxtrain.systems.memory_lm.tokenizers import load_tokenizer

            model = self.config.model
            name = model.tokenizer_name or model.base_model_name or "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
            found = data.with_special_ids(load_tokenizer(name), model)
            self._loaders["tokenizer"] = inner = getattr(found, "inner", found)
            if inner.pad_token_id is None:
                inner.pad_token = inner.eos_token
        return self._loaders["tokenizer"]

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._loaders["tokenizer"] = tokenizer

    def _loader(self, split: str) -> Any:
        if split not in self._loaders:
            from jaxtrain.systems.memory_lm.original.datasets import create_dataloader

            training, train = self.config.training, split == "train"
            self._loaders[split] = create_dataloader(
                training.dataset_name,
                self.tokenizer,
                training.batch_size,
                training.max_length,
                training.dataset_split if train else training.eval_split,
                training.dataset_subset,
                training.text_field,
                training.training_mode,
                num_workers=0,
                shuffle=train,
                drop_last=train,
            )
        return self._loaders[split]

    @property
    def train_dataloader(self) -> Any:
        """Return a shuffled torch DataLoader of the training split."""
        return self._loader("train")

    @train_dataloader.setter
    def train_dataloader(self, loader: Any) -> None:
        self._loaders["train"] = loader
        self._replaced.add("train_dataloader")

    @property
    def eval_dataloader(self) -> Any:
        """Return a torch DataLoader of the evaluation split, not shuffled."""
        return self._loader("eval")

    @eval_dataloader.setter
    def eval_dataloader(self, loader: Any) -> None:
        self._loaders["eval"] = loader
        self._replaced.add("eval_dataloader")

    train_loader, val_loader = train_dataloader, eval_dataloader

    # --- steps ---------------------------------------------------------------------------------------------------

    @staticmethod
    def compute_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        """Return the loss of a batch and values to log. Written in torch, but recorded once and compiled."""
        out = model(**batch)
        terms = [one for one in out["router_losses"] if one]
        router = model._aggregate_router_losses(terms) if terms else torch.zeros(())
        return out["loss"], {"router_aux_loss": router}

    def training_step(self, batch: Mapping[str, torch.Tensor], update: bool = True) -> dict[str, Any]:
        """Run forward and backward, and with `update` clipping, optimizer and scheduler; return values to log.

        The values are computed asynchronously: reading one waits for it. Without `update` the gradients are accumulated
        for the next call; the loss is divided by gradient_accumulation_steps.
        """
        step = self._step()
        self._module().train()
        _, found = step(dict(batch), update=update)
        if update:
            self._scheduler.step()
            self.global_step += 1
        return found

    def train_epoch(self) -> bool:
        """Run one pass over the training data; return True if the run is finished.

        Raises UserError if the training data has fewer rows than a batch.
        """
        training, loader = self.config.training, self.train_dataloader
        count, began = len(loader), time.perf_counter()
        if not count:
            raise UserError(f"the training data has fewer rows than training.batch_size={training.batch_size}")
        for index, batch in enumerate(loader):
            place = index + 1
            update = place % training.gradient_accumulation_steps == 0 or place == count
            found = self._newest = self.training_step(batch, update)
            if not update:
                continue
            if self.global_step == 1 or self.global_step % training.logging_steps == 0:
                rate = self._torch_optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
                seconds, began = time.perf_counter() - began, time.perf_counter()
                values = {f"train/{name}": float(value) for name, value in found.items()}
                self.log_metrics(values | {"train/learning_rate": rate, "train/step_time_s": seconds}, self.global_step)
            if self.global_step % training.eval_steps == 0 and self._evaluated(found):
                return True
            if self.global_step % training.save_steps == 0:
                self.save_checkpoint(loss=float(found["loss"]))
            if self.global_step >= self.total_steps:
                break
        return self.global_step >= self.total_steps

    def _evaluated(self, found: Mapping[str, Any]) -> bool:
        loss = self.evaluate()["eval_loss"]
        self.log_metrics({"eval/loss": loss}, self.global_step)
        print(f"Step {self.global_step}: eval_loss = {loss:.4f}", flush=True)
        best = loss < self.best_loss
        self.should_stop = self.check_early_stopping(loss)
        if best and self.config.training.save_best_model:
            self.save_checkpoint(self.output_dir / "best_model", loss)
            self.save_checkpoint(loss=loss)
        return self.should_stop

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
        """Print values; override it to send them elsewhere."""
        shown = " ".join(f"{name}={value:.4g}" for name, value in values.items())
        print(f"step {step}/{self.total_steps} {shown}", flush=True)

    # --- the loop ------------------------------------------------------------------------------------------------

    def train_on_host(self) -> dict[str, Any]:
        self._step()
        histories: list[dict[str, float]] = []
        self._newest = None
        over = self.global_step >= self.total_steps
        while not over:
            over = self.train_epoch()
            self.epoch += 1
        self._compiled.sync()  # type: ignore[union-attr]
        loss = None if self._newest is None else float(self._newest["loss"])
        self.save_checkpoint(self.output_dir / "final_model", loss)
        print(f"Training complete! Final step: {self.global_step}\nBest eval loss: {self.best_loss:.4f}", flush=True)
        return {"best_val_loss": self.best_loss, "train_history": histories, "val_history": histories}

    @torch.no_grad()
    def evaluate_on_host(self) -> dict[str, float]:
        model, total, count = self._module(), 0.0, 0
        was = model.training
        model.eval()
        forward = self._step().forward
        for batch in self.eval_dataloader:
            logits = forward(batch["input_ids"], batch["attention_mask"])["logits"]
            labels = batch["labels"][:, 1:]
            nll = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            total, count = total + float(nll), count + int((labels != -100).sum())
        model.train(was)
        return {"eval_loss": total / count if count else math.nan}

    def _step(self) -> StepOrTorch:
        if self._compiled is None:
            precision = self.config.training.mixed_precision
            if precision not in PRECISIONS:
                raise UserError(
                    f"training.mixed_precision: {precision} is not offered for steps of your own; take bf16 or no"
                )
            module, optimizer = self.model, self.optimizer  # synchronised with the engine
            self._on_host = True
            self._compiled = StepOrTorch(
                module,
                functools.partial(_loss, self.compute_loss, self.config.training),
                optimizer,
                precision=PRECISIONS[precision],
                clip_norm=self.config.training.max_grad_norm or None,
                say=lambda line: print(line, flush=True),
            )
        return self._compiled

    def host_tree(self) -> dict[str, Any]:
        """Return the training state of the torch objects in the form that checkpoint_files takes."""
        model, optimizer = self.model, self.optimizer  # type: ignore[attr-defined]
        arrays: dict[int, Any] = {}  # by address, so that a tied weight stays one object
        weights = model.state_dict()
        return {
            "model": {key: arrays.setdefault(x.data_ptr(), to_numpy(x)) for key, x in weights.items()},
            "optimizer": optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
        }
