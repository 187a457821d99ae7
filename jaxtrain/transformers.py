"""transformers' Trainer with its training step compiled by XLA: `from jaxtrain.transformers import Trainer`.

The loop stays transformers' own: arguments, collators, schedulers, callbacks, logging, evaluation and `checkpoint-N/`
folders are its code. Only forward, backward, clipping and the optimizer's update of a step run as one XLA program, on
the optimizer and scheduler that transformers made; either side resumes the other's checkpoints. Every other public name
is transformers' own: `from jaxtrain.transformers import AutoTokenizer, Trainer, TrainingArguments`.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers

from jaxtrain import drop_in_sharding
from jaxtrain.compiled_step import CompiledStep
from jaxtrain.compiled_step import compile as compile_step
from jaxtrain.drop_in_lengths import RoundedLengths
from jaxtrain.errors import UserError
from jaxtrain.lazy import library_names, signature_of
from jaxtrain.runtime import host_memory, joining
from torch_bridge.datasets.map_style import TorchRandom
from torch_bridge.lowering.errors import CannotRecord, NotCaptured
from torch_bridge.step_rules import reason_of
from torch_bridge.torch_step import set_gradients
from torch_bridge.training.eager_value import has_collate, uses_batch_statistics, value_of

if TYPE_CHECKING:
    from transformers import *  # noqa: F403  # pyright: ignore[reportAssignmentType]
else:
    __getattr__, __dir__ = library_names(__name__, "transformers")

REFUSED = {
    "fp16": "float16 needs a loss scale inside the step; use bf16=True",
    "fp16_full_eval": "use bf16",
    "deepspeed": "JAX shards the state itself; train with jaxtrain.Trainer and shard.strategy",
    "torch_compile": "the step is compiled by XLA already; leave it out",
    "push_to_hub": "nothing is uploaded from here; call model.push_to_hub() yourself after training",
    "auto_find_batch_size": "choose per_device_train_batch_size yourself",
    "use_liger_kernel": "its kernels are CUDA's; leave it out",
    "accelerator_config.split_batches": "leave it out",
    "parallelism_config": "train with jaxtrain.Trainer and shard.strategy",
    "debug": "it watches torch's own forward pass; jaxtrain.Trainer has train.check_numerics",
}
READ_GRADIENTS = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
STEP_METHODS = ("training_step", "_clip_grad_norm", "_get_grad_norm")  # a subclass may do anything with a step in these
STEPS, ITEMS = "jaxtrain_accumulation_steps", "jaxtrain_items_in_batch"  # added to the batch's own entries


class CompiledTraining:
    """Mixin in front of a trainer of transformers, or of a library that builds on it: replaces the training step, and
    writes weights back before evaluation and saving. Attributes begin with _xla_: TRL's trainers have a _step, too."""

    _xla_step: CompiledStep | None = None  # before the first step
    _xla_lengths: RoundedLengths | None = None
    clears_all_gradients = False  # transformers clears those of the model; a library may clear the loss's own, too
    _xla_shard = "ddp"  # strategy of jaxtrain.compile
    _xla_micro = 0  # micro-batches since the last update
    _xla_off = True  # a training_step called outside train() runs in torch and leaves gradients

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse arguments without a counterpart. transformers calls this before it uploads or builds anything."""
        self._xla_shard = drop_in_sharding.of_transformers(self.args)
        for name, advice in REFUSED.items():
            value: Any = self.args
            for part in name.split("."):
                value = getattr(value, part, None)
            if value:
                raise UserError(f"TrainingArguments.{name}={value!r} has no counterpart here: {advice}")
        if self._xla_joins:
            joined = joining.join("jaxtrain.transformers")
            if joined is not None and joined.process == 0:
                print(joined)
        super().create_accelerator_and_postprocess()
        if self._xla_joins:  # no DistributedDataParallel around a model whose gradients XLA reduces
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    @property
    def _xla_joins(self) -> bool:
        """Return True if several processes run one program, each with its rows of the batch."""
        return self._xla_shard != "ddp" and self.args.world_size > 1

    @contextlib.contextmanager
    def _xla_global_items(self) -> Iterator[None]:
        """Compute a loss of the rows of all processes: transformers multiplies one process's by their number, because
        it averages their gradients."""
        averages = self.args.average_tokens_across_devices
        if self._xla_joins:
            self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = averages

    def sync(self) -> None:
        """Write the trained weights and the optimizer's state into the torch model and optimizer."""
        if self._xla_step is not None and self._xla_step.ahead:
            self._xla_step.sync()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run one micro-batch; the last one of an update also clips the gradients and updates the weights."""
        if self._xla_off:
            return super().training_step(model, inputs, num_items_in_batch)
        try:
            step = self._compiled(model)
        except UserError as error:
            self._go_apart(str(error).partition("\n")[0])
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        batch = dict(self._fitted(model, self._prepare_inputs(inputs)))
        step.count = (
            self.state.global_step * self.args.gradient_accumulation_steps + self._xla_micro
        )  # for the random keys
        updating = self.accelerator.sync_gradients
        counts = {STEPS: torch.tensor(float(self.current_gradient_accumulation_steps))}
        if num_items_in_batch is not None:
            counts[ITEMS] = torch.as_tensor(num_items_in_batch).float()
            if self._xla_joins and not self.args.average_tokens_across_devices:
                counts[ITEMS] = self.accelerator.reduce(counts[ITEMS], "sum")
        try:
            with self._xla_global_items():
                loss = step.captured(batch | counts, updating)
        except (NotCaptured, CannotRecord) as error:
            self._go_apart(f"a step cannot be one program ({reason_of(error)})")
            return super().training_step(model, inputs, num_items_in_batch)
        self._xla_micro = 0 if updating else self._xla_micro + 1
        return torch.tensor(float(loss), device=self.args.device)

    def _overriding(self, method: str) -> str:
        """Return the name of a class that overrides a method: a user's, or one of a library on top of transformers."""
        kinds = (kind for kind in type(self).__mro__ if method in vars(kind))
        names = (kind.__name__ for kind in kinds if not kind.__module__.startswith(("transformers.", "jaxtrain.")))
        return next(names, "")

    def _go_apart(self, reason: str) -> None:
        """Stop compiling whole steps: from now on only the model's forward and backward pass are compiled. Raises
        UserError where several processes share a model that none of them holds whole."""
        if self._xla_joins:
            raise UserError(
                f"TrainingArguments.fsdp: {reason}, and {self.args.world_size} processes train a sharded model as one "
                "program only: start one process, which drives all devices of its machine"
            )
        print(f"{reason}: forward and backward of the model run compiled, updates run in torch")
        self._xla_off = True
        if self._xla_step is not None:
            self.sync()
            set_gradients(self._xla_step.weights.tensors, self._xla_step.weights.tensors.values(), self._xla_step.grads)
        from torch_bridge.capture.module_call import compile_calls  # takes seconds, and few trainings need it

        compile_calls([self.model])

    def _fitted(self, model: Any, inputs: Any) -> Any:
        """Return the inputs, padded to one of a few shapes if they come in many lengths."""
        loader = self.callback_handler.train_dataloader
        if self._xla_lengths is None:
            self._xla_lengths = RoundedLengths(print)
            if has_collate(loader) and not uses_batch_statistics(model):
                loss = lambda rows: self.compute_loss(model, self._prepare_inputs(rows))
                value = lambda rows: value_of(model, loss, rows)
                given = loader.dataset, loader.collate_fn, self._train_batch_size, len(loader)
                self._xla_lengths.learn(*given, value, [TorchRandom()])
        return self._xla_lengths.fit(inputs)

    def _compiled(self, model: Any) -> CompiledStep:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if self._xla_step is None or self._xla_step.optimizer is not optimizer:
            model_parameters = set(map(id, model.parameters()))
            outside = any(id(p) not in model_parameters for group in optimizer.param_groups for p in group["params"])
            if outside and not self.clears_all_gradients:
                raise UserError("the optimizer holds parameters outside the model, whose gradients are never cleared")
            resumed = self.state.global_step > 0  # with the bits of a run that was not interrupted
            self._xla_step = compile_step(
                model, self._loss, optimizer, seed=self.args.seed, shard=self._xla_shard, wait=resumed
            )
            place = self._xla_step.weights.described()
            if place and self.is_world_process_zero():
                print(place)
            self._xla_step.clipped = model  # not a loss's parameters, which the optimizer may hold too
        limit = self.args.max_grad_norm  # a callback may change it
        self._xla_step.clip_norm = (
            limit if limit and limit > 0 else float("inf")
        )  # never None: transformers logs the norm
        return self._xla_step

    def _loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Call compute_loss, and divide its result as transformers' training_step does."""
        inputs = {key: value for key, value in batch.items() if key not in (STEPS, ITEMS)}
        items = batch.get(ITEMS)
        loss = self.compute_loss(model, inputs, num_items_in_batch=items)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        return loss if scaled else loss / batch[STEPS]

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        if self._xla_off:
            return super()._clip_grad_norm(model)
        return torch.tensor(float(self._xla_step.grad_norm))  # clipped inside the step

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self._xla_off:
            return super()._get_grad_norm(model, grad_norm)
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _inner_training_loop(self, *arguments: Any, **options: Any) -> Any:
        if self.args.n_gpu > 1:  # of a model that spans several, transformers has made it 1
            raise UserError(f"DataParallel over {self.args.n_gpu} GPUs has no counterpart here: start with torchrun")
        self._xla_step, self._xla_lengths, self._xla_micro = None, None, 0
        callbacks = self.callback_handler.callbacks
        readers = [f"{type(c).__name__}.{hook}" for c in callbacks for hook in READ_GRADIENTS if _overrides(c, (hook,))]
        readers += [f"{kind}.{name}" for name in STEP_METHODS if (kind := self._overriding(name))]
        processes = self.args.world_size
        self._xla_off = bool(readers) or (processes > 1 and not self._xla_joins)
        if self._xla_off:
            self._go_apart(f"{readers[0]} takes part in a step" if readers else f"{processes} processes share a step")
        try:
            with host_memory.kept():
                return super()._inner_training_loop(*arguments, **options)
        finally:
            self._xla_off = True

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        self.sync()
        return super()._finalize_training(*arguments, **options)

    @signature_of(transformers.Trainer.evaluation_loop)
    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        self.sync()
        return super().evaluation_loop(*arguments, **options)

    @signature_of(transformers.Trainer.save_model)
    def save_model(self, *arguments: Any, **options: Any) -> None:
        self.sync()
        super().save_model(*arguments, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        self.sync()
        return super()._save_checkpoint(*arguments, **options)


def _overrides(callback: Any, hooks: tuple[str, ...]) -> bool:
    """Return True if a callback that is not transformers' own overrides one of these hooks."""
    kind = type(callback)
    plain = transformers.TrainerCallback
    return not kind.__module__.startswith("transformers.") and any(
        getattr(kind, hook, None) is not getattr(plain, hook) for hook in hooks
    )


class Trainer(CompiledTraining, transformers.Trainer):
    """transformers.Trainer with a compiled training step. Arguments, methods and files are transformers' own."""


class Seq2SeqTrainer(CompiledTraining, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer with a compiled training step; generation runs in torch on the trained weights."""
