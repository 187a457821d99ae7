"""`Trainer`, the public interface: takes a model, data and a config; trains, evaluates, returns torch state dicts."""

import contextlib
import copy
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flax import nnx

from jaxtrain.config import LoraConfig, TrainingConfig
from jaxtrain.data.loader import Loader
from jaxtrain.data.sources import as_source
from jaxtrain.errors import UserError
from jaxtrain.runtime.folder_lock import held_by_all
from jaxtrain.runtime.mesh import Layout
from jaxtrain.task import Task
from jaxtrain.torch_task import is_torch_module
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint import loading
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.compilation import micro_batch
from jaxtrain.train.loop import rehearsal
from jaxtrain.train.loop.callbacks import Callbacks, Control
from jaxtrain.train.loop.loop import AfterEvaluation
from jaxtrain.train.program import Program
from jaxtrain.train.resume import fingerprint, origin
from jaxtrain.train.resume.saved_weights import SavedWeights
from jaxtrain.train.search import lr_range
from jaxtrain.train.session import Session
from jaxtrain.train.step.state import TrainState
from jaxtrain.train.tracking import description
from jaxtrain.train.user import same_start
from jaxtrain.train.user.module_edits import ModuleEdits
from jaxtrain.train.user.module_reads import ModuleReads
from jaxtrain.train.user.parts import UserParts
from jaxtrain.train.user.reached import written_back
from jaxtrain.train.user.resolve_task import check_arguments, resolve_task, task_of_module, with_defaults, with_lora
from jaxtrain.train.verification import certifier
from jaxtrain.train.verification.certificate import Certificate
from torch_bridge import state_dict as bridge


class Trainer(SavedWeights):
    """Trainer of a torch module or a flax model on torch Datasets (or arrays).

    Under torchrun, Slurm or MPI the first Trainer connects the processes, which then train one model.

    Args:
        model: a torch.nn.Module, converted and still a torch module at the end (docs/from_torch.md), an nnx.Module, or
            None to let the task build it, sharded from the start. It holds the trained weights after `train`.
        train_dataset: a torch Dataset, a DataLoader, a mapping of arrays or a sequence; None: the task's own.
        val_dataset: likewise; None: the task's own, or no evaluation.
        config: the settings.
        task: a Task or its name; default: `config.task`.
        loss: for a torch module a loss module, a function of (output, batch), or None for the loss that the module
            returns. For a flax model without a task (model, batch, rngs) -> a scalar, a value per sample, (value,
            weight) or Loss; batches are dicts, "0", "1", ... for tuples, and an epoch's last has its true size.
        optimizer: in place of `config.optim`: a torch.optim optimizer over the torch module's parameters, whose
            state_dict() has the state after training, or an optax GradientTransformation.
        scheduler: a torch lr_scheduler of that optimizer, or, without optimizer, an optax schedule.
        scheduler_interval: when the torch scheduler is stepped.
        metrics: by name a function (outputs, batch), a torchmetrics object or a WholeSplit.
        compute_metrics: transformers' function of its name.
        callbacks: objects with any of the hooks in docs/callbacks.md, which make requests through `trainer.run`.
        lora: adapters for a torch module, in place of the config's.
        devices: JAX devices; default: all.
        abstract: shapes and shardings only, to compile for devices that this machine does not have.

    Raises:
        UserError: for every error that the user can fix, before the first step.

    Examples:
        >>> import torch, jaxtrain
        >>> model = torch.nn.Linear(3, 1)
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        >>> config = jaxtrain.TrainingConfig(learning_rate=0.1, num_epochs=100, run={"name": "sums", "quiet": True})
        >>> trainer = jaxtrain.Trainer(model, data, data, config, loss=torch.nn.MSELoss())
        >>> trainer.train()["best_val_loss"] < 0.1
        True
        >>> model.load_state_dict(torch.load("runs/sums/exports/best.pt"))
        <All keys matched successfully>
    """

    def __init__(
        self,
        model: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        config: TrainingConfig | None = None,
        *,
        task: Task | str | None = None,
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        metrics: Mapping[str, Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: Sequence[Any] = (),
        lora: LoraConfig | Mapping[str, Any] | None = None,
        devices: list | None = None,
        abstract: bool = False,
    ):
        config = TrainingConfig() if config is None else config
        check_arguments(model, {"train_dataset": train_dataset, "val_dataset": val_dataset}, config, loss)
        config = with_lora(config, lora)
        if not abstract:
            same_start.join(config, model, loss)
        self.abstract = abstract
        self.callbacks, self.run = Callbacks(callbacks, self), Control()
        self.user_model, self.user_loss = model, loss
        self.user_data = fingerprint.UserData({"train": train_dataset, "validation": val_dataset})
        self._fingerprint: fingerprint.Fingerprint | None = None
        parts = UserParts.of(config, model, loss, optimizer, scheduler, scheduler_interval)
        if is_torch_module(model):
            train_dataset = None if train_dataset is None else as_source(train_dataset, "train")
            task, model = task_of_module(model, train_dataset, config, loss, task), None
        resolved = resolve_task(task, loss, config)
        config = with_defaults(resolved, config)
        config = rehearsal.shortened(config) if config.train.fast_dev_run else config
        parts = parts.with_metrics(metrics, compute_metrics, self.user_model, resolved)
        resolved, config = parts.applied(resolved, config)
        self.program = Program(resolved, config, train_dataset, val_dataset, model, devices, abstract, parts)
        self.begin_fresh(abstract)
        self._edits: ModuleEdits | None = None
        if is_torch_module(self.user_model):
            given = self.user_model, loss
            self.callbacks.reads = ModuleReads(*given, self.write_back, lambda: self.state, optimizer, scheduler)
            self._edits = ModuleEdits(*given, optimizer)

    # --- parts --------------------------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        return self.program.task

    @property
    def config(self) -> TrainingConfig:
        """Return the config with the task's own sections, and with the batch size of a DataLoader that decides it."""
        return self.program.config

    @property
    def folder(self) -> pathlib.Path:
        """Return the run folder."""
        return self.config.run.folder

    @property
    def state(self) -> TrainState:
        return self.program.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.program.state = state

    @property
    def layout(self) -> Layout:
        return self.program.layout

    @property
    def train_loader(self) -> Loader:
        return self.program.train_loader

    @property
    def total_steps(self) -> int:
        return self.program.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self.program.steps_per_epoch

    if not TYPE_CHECKING:  # else a type checker takes every misspelt name for an attribute of Program

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of Program, such as `train_step`, `hyper`, `columns` or `schedule`."""
            if name.startswith("_") or "program" not in self.__dict__:
                raise AttributeError(f"Trainer has no attribute {name!r}")
            try:
                return getattr(self.program, name)
            except AttributeError as error:
                if error.obj is not self.program:
                    raise
                raise AttributeError(f"Trainer has no attribute {name!r}", name=name, obj=self) from None

    def source(self, split: str) -> Any:
        """Return the dataset of a split; None if there is none."""
        return self.program.data.source(split)

    def variant(self, config: TrainingConfig) -> "Trainer":
        """Return a trainer at the start of another run, which shares this one's data and compiled programs.

        config: may differ only in numbers (Task.traced_hparams), rates, schedule and run folder. Raises ValueError for
        any other difference, and if the trainer was given a model, which cannot be built anew.
        """
        if self.user_model is not None:
            raise ValueError("a variant starts from fresh weights; this trainer was given a model")
        other = copy.copy(self)
        other.program, other._fingerprint = self.program.variant(config), None
        other.begin_fresh()
        return other

    # --- a run --------------------------------------------------------------------------------------------------

    def train(self, resume: str = "auto", after_evaluation: AfterEvaluation | None = None) -> dict[str, Any]:
        """Train to the end of the config, resuming from checkpoints of this same run in the run folder.

        The model then holds the last weights; `load_best` loads the best. A folder that holds another run
        (docs/checkpoints.md) is refused; if no folder was named, a new one is used: see `folder`.

        Args:
            resume: "auto", "never" (refuses a folder that holds checkpoints), or a run's folder: another run's, or this
                run's own, to resume whatever has changed.
            after_evaluation: (step, validation metrics) -> True ends the run there.

        Returns:
            best_val_loss, train_history and val_history (one dict per epoch or evaluation), best (the metrics and the
                step of the evaluation with the best evaluation.metric) and best_metric, its value (NaN without one).
        """
        if not isinstance(resume, str | os.PathLike):
            raise UserError(
                f"train: resume is {type(resume).__name__}, wanted auto, never or a run folder; data, config and loss "
                "go to Trainer(model, train_dataset, val_dataset, config, loss=...)"
            )
        self._take_edits()
        if reads := self.callbacks.reads:
            reads.settings.begin(self.program)
        if self.config.train.fast_dev_run:
            return self._rehearse()
        forced = resume not in ("auto", "never") and run_dir.same(resume, self.folder)
        warnings = origin.choose_folder(self.program, self.fingerprint, "auto" if forced else resume, forced)
        with written_back(self.program, self.write_back):
            try:
                with held_by_all(self.folder):
                    return self._train_locked("here" if forced else resume, after_evaluation, warnings)
            finally:
                self.user_data.after_training()

    def _rehearse(self) -> dict[str, Any]:
        """Run one batch of everything, in a temporary folder."""
        try:
            with rehearsal.folder_of(self.program):
                return self._train_locked("never", None, [rehearsal.NOTE])
        finally:
            self.user_data.after_training()

    @property
    def fingerprint(self) -> fingerprint.Fingerprint:
        """Return the run's fingerprint. It includes the initial weights, so read it before they change."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint.of(self.program, self.user_model, self.user_loss, self.user_data)
        return self._fingerprint

    def _train_locked(self, resume: str, after: AfterEvaluation | None, warnings: list[str]) -> dict[str, Any]:
        own = self.callbacks, self.run, self.write_back, self._warm_start
        session = Session(self.program, self.fingerprint, resume, *own)
        self._begun = not self.config.train.fast_dev_run
        try:
            with contextlib.ExitStack() as stack:
                for part in (self._edits, self.callbacks.reads):
                    if part is not None:
                        stack.enter_context(part.during_training())
                return session.run(after, warnings)
        finally:
            self._fingerprint = session.fingerprint  # as recorded, so that a second train() continues the run
            self.exported, self.export_failure = session.exported, session.export_failure

    def checkpoints(self, warn: Callable[[str], None] = print, folder: pathlib.Path | None = None) -> Checkpoints:
        """Return the checkpoints of the run folder, or of another run's. warn: called with a line about problems."""
        return run_dir.checkpoints(folder or self.folder, self.config, warn)

    def evaluate(self, split: str = "validation") -> dict[str, float]:
        """Return the metrics of the current weights (the averaged ones if they exist) on a whole split."""
        self._take_weights()
        return self.program.evaluate(split)

    def verify(self, steps: int = 20) -> Certificate:
        """Compare the torch module with torch: every layer, every gradient, some updates (docs/verify.md).

        Args:
            steps: updates on both sides.
        """
        self._take_weights()
        return certifier.of(self, steps)

    def lr_find(self, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100) -> lr_range.RangeTest:
        """Run a learning-rate range test on a copy of the state; `.steepest` is the suggested rate.

        Args:
            min_lr: the first step's rate.
            max_lr: the last step's.
            steps: how many, the rate growing by one factor between them.
        """
        self._take_weights()
        return lr_range.range_test(self.program, min_lr, max_lr, steps)

    def find_batch_size(self, limit_bytes: int | None = None) -> int:
        """Find the largest data.batch_size whose step fits into a device's memory, within a sixteenth. Runs no step.

        Args:
            limit_bytes: of one device; default: data.memory_limit_bytes, else what the device offers.
        """
        return micro_batch.largest_batch(self.program, limit_bytes)

    def __repr__(self) -> str:
        steps = f"{self.total_steps} steps" if self.abstract else f"step {int(self.state.step)} of {self.total_steps}"
        return f"Trainer({self._what()}, {steps}, {self.folder})"

    def __rich_repr__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield what rich shows of it in a terminal, a line for each."""
        yield None, self._what()
        yield "step", f"0 of {self.total_steps}" if self.abstract else f"{int(self.state.step)} of {self.total_steps}"
        yield "folder", str(self.folder)
        yield "best", None if self.abstract else self.best
        yield "config", self.config

    def describe(self) -> str:
        """Describe the run in a few lines."""
        return description.describe(self.program, self._what(), self.folder)

    def _what(self) -> str:
        """Name the model, or the task that makes it."""
        return str(self.config.task) if self.user_model is None else type(self.user_model).__name__

    # --- weights ------------------------------------------------------------------------------------------------

    def model(self) -> nnx.Module:
        """Return the model with the current weights (the averaged ones if they exist)."""
        self._take_weights()
        return self.program.model()

    def state_dict(self) -> dict[str, Any]:
        """Return the current weights under torch's keys, as numpy arrays for `torch_bridge.files.save`. For a torch
        module, they include its submodules' extra states, as its own `state_dict()` does."""
        return loading.with_extra_states(self.program, bridge.state_dict(self.model()))

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, source: str = "the state dict"
    ) -> tuple[list[str], list[str]]:
        """Load weights from a torch state dict. A torch module's own load hooks run on it first.

        Args:
            state: tensors, arrays or LazyArrays by torch's names.
            strict: refuse missing and unexpected names.
            source: what an error calls it.

        Returns:
            The missing and the unexpected names.

        Raises:
            StateDictMismatch: if the weights do not fit.
        """
        if not isinstance(state, Mapping):
            raise UserError(
                f"load_state_dict: {type(state).__name__}, wanted a state dict: torch.load(FILE) or "
                "safetensors.torch.load_file(FILE) reads one"
            )
        if not int(self.state.step):
            self._take_weights()
        keys = loading.load(self.program, state, strict, source)
        if self._edits is not None:
            self._edits.note()
        return keys

    def write_back(self) -> None:
        """Write the current weights (the averaged ones if they exist) and optimizer state into the user's objects."""
        with (reads := self.callbacks.reads) is not None and reads.writing() or contextlib.nullcontext():
            if reads is not None:
                from torch_bridge.from_torch import write_back

                write_back(self.program.model(), self.user_model)
            elif self.user_model is not None:
                nnx.update(self.user_model, nnx.state(self.program.model()))
            if given := self.program.given:
                step, updates = int(self.state.step), int(self.state.updates)
                given.write_back(self.state.opt_state, updates, step, self.steps_per_epoch)
        if self._edits is not None:
            self._edits.note()
