"""transformers' Trainer with its training step compiled by XLA: `from jaxtrain.transformers import Trainer`.

The loop stays transformers' own: arguments, collators, schedulers, callbacks, logging, evaluation and `checkpoint-N/`
folders are its code. Only forward, backward, clipping and the optimizer's update of a step run as one XLA program, on
the optimizer and scheduler that transformers made; either side resumes the other's checkpoints.
"""

from typing import Any

import torch
import transformers
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from jaxtrain.compiled_step import CompiledStep
from jaxtrain.compiled_step import compile as compile_step
from jaxtrain.drop_in_lengths import RoundedLengths
from jaxtrain.errors import UserError
from torch_bridge.compiled_call import CompiledForward
from torch_bridge.datasets.map_style import TorchRandom
from torch_bridge.training.eager_value import has_collate, uses_batch_statistics, value_of

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]

REFUSED = {
    "fp16": "float16 needs a loss scale inside the step; use bf16=True",
    "fp16_full_eval": "use bf16",
    "deepspeed": "JAX shards the state itself; train with jaxtrain.Trainer and shard.strategy",
    "fsdp": "train with jaxtrain.Trainer and shard.strategy=fsdp",
    "torch_compile": "the step is compiled by XLA already; leave it out",
    "push_to_hub": "nothing is uploaded from here; call model.push_to_hub() yourself after training",
    "auto_find_batch_size": "choose per_device_train_batch_size yourself",
    "use_liger_kernel": "its kernels are CUDA's; leave it out",
    "accelerator_config.split_batches": "leave it out",
    "parallelism_config": "train with jaxtrain.Trainer and shard.strategy",
    "debug": "it watches torch's own forward pass; jaxtrain.Trainer has train.check_numerics",
}
STEPS, ITEMS = "jaxtrain_accumulation_steps", "jaxtrain_items_in_batch"  # beside the batch's own entries


class _CompiledTraining:
    """Replace transformers' training step in both trainers, and write weights back before they are read."""

    _step: CompiledStep | None = None
    _lengths: RoundedLengths | None = None
    _micro = 0  # micro-batches since the last update

    def __init__(self, *arguments: Any, **options: Any):
        given = options.get("args", arguments[1] if len(arguments) > 1 else None)  # before anything is uploaded
        for name, advice in REFUSED.items():
            value: Any = given
            for part in name.split("."):
                value = getattr(value, part, None)
            if value:
                raise UserError(f"TrainingArguments.{name}={value!r} has no counterpart here: {advice}")
        super().__init__(*arguments, **options)
        if self.args.n_gpu > 1:
            raise UserError(f"DataParallel over {self.args.n_gpu} GPUs has no counterpart here: start with torchrun")
        self._apart = self.args.world_size > 1

    def sync(self) -> None:
        """Write the trained weights and the optimizer's state into the torch model and optimizer."""
        if self._step is not None and self._step.weights.dirty:
            self._step.sync()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch; the last of an update clips the gradients and updates the weights too."""
        if self._apart:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        batch = dict(self._fitted(model, self._prepare_inputs(inputs)))
        batch[STEPS] = torch.tensor(float(self.current_gradient_accumulation_steps))
        if num_items_in_batch is not None:
            batch[ITEMS] = torch.as_tensor(num_items_in_batch).float()
        step = self._compiled(model)
        step.count = self.state.global_step * self.args.gradient_accumulation_steps + self._micro  # of the random keys
        updating = self.accelerator.sync_gradients
        loss = step(batch, update=updating)
        self._micro = 0 if updating else self._micro + 1
        if updating and self._watched:
            self.sync()
        return torch.tensor(float(loss), device=self.args.device)

    def _fitted(self, model: Any, inputs: Any) -> Any:
        """The inputs, rounded up to one of a few shapes where they come in many lengths."""
        loader = self.callback_handler.train_dataloader
        if self._lengths is None:
            self._lengths = RoundedLengths(print)
            if has_collate(loader) and not uses_batch_statistics(model):
                loss = lambda rows: self.compute_loss(model, self._prepare_inputs(rows))
                value = lambda rows: value_of(model, loss, rows)
                given = loader.dataset, loader.collate_fn, self._train_batch_size, len(loader)
                self._lengths.learn(*given, value, [TorchRandom()])
        return self._lengths.fit(inputs)

    def _compiled(self, model: Any) -> CompiledStep:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if self._step is None or self._step.optimizer is not optimizer:
            limit = self.args.max_grad_norm
            norm = limit if limit and limit > 0 else float("inf")  # transformers logs the norm in any case
            self._step = compile_step(model, self._loss, optimizer, clip_norm=norm, seed=self.args.seed)
            self._watched = [callback for callback in self.callback_handler.callbacks if _reads_weights(callback)]
            if self._watched:
                names = ", ".join(type(callback).__name__ for callback in self._watched)
                print(f"weights are written back after every step, because {names} may read them")
        return self._step

    def _loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """compute_loss, divided as transformers' training_step divides it. Recorded once."""
        inputs = {key: value for key, value in batch.items() if key not in (STEPS, ITEMS)}
        items = batch.get(ITEMS)
        loss = self.compute_loss(model, inputs, num_items_in_batch=items)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        return loss if scaled else loss / batch[STEPS]

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        if self._apart:
            return super()._clip_grad_norm(model)
        return torch.tensor(float(self._step.grad_norm))  # clipped inside the step

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self._apart:
            return super()._get_grad_norm(model, grad_norm)
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _inner_training_loop(self, *arguments: Any, **options: Any) -> Any:
        self._step, self._lengths, self._micro = None, None, 0
        readers = [c for c in self.callback_handler.callbacks if _overrides(c, ("on_pre_optimizer_step",))]
        self._apart = self.args.world_size > 1 or bool(readers)
        if self._apart and not isinstance(vars(self.model).get("forward"), CompiledForward):
            self.model.forward = CompiledForward(self.model)  # gradients and updates are torch's
            if readers:
                print(f"{type(readers[0]).__name__}.on_pre_optimizer_step takes part in a step: updates run in torch")
        return super()._inner_training_loop(*arguments, **options)

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        self.sync()
        return super()._finalize_training(*arguments, **options)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        self.sync()
        return super().evaluation_loop(*arguments, **options)

    def save_model(self, *arguments: Any, **options: Any) -> None:
        self.sync()
        super().save_model(*arguments, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        self.sync()
        return super()._save_checkpoint(*arguments, **options)


def _reads_weights(callback: Any) -> bool:
    """Tell whether a callback that is not transformers' own is called between steps, where it may read the model."""
    return _overrides(callback, ("on_step_begin", "on_step_end", "on_substep_end", "on_optimizer_step"))


def _overrides(callback: Any, hooks: tuple[str, ...]) -> bool:
    """Tell whether a callback that is not transformers' own has one of these hooks."""
    kind = type(callback)
    plain = transformers.TrainerCallback
    return not kind.__module__.startswith("transformers.") and any(
        getattr(kind, hook, None) is not getattr(plain, hook) for hook in hooks
    )


class Trainer(_CompiledTraining, transformers.Trainer):
    """transformers.Trainer with a compiled training step. Arguments, methods and files are transformers' own."""


class Seq2SeqTrainer(_CompiledTraining, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer with a compiled training step; generation runs in torch on the trained weights."""
