"""Assembly of a run: mesh, data, model, optimizer, sharded state, restore. The loop itself is in `loop.py`."""

import contextlib
import copy
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import TrainingConfig
from jaxtrain.data.loader import Loader
from jaxtrain.data.sources import as_source, batch_shapes, describe_size
from jaxtrain.errors import UserError
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.optim import schedules
from jaxtrain.runtime import compile_cache, cpu_threads, host_memory, prng, traced_hparams, xla_flags
from jaxtrain.runtime.folder_lock import FolderLock
from jaxtrain.runtime.launch import broadcast_from_process_zero
from jaxtrain.runtime.mesh import make_layout
from jaxtrain.runtime.peak_flops import peak_flops
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.runtime.preemption import PREEMPTION, Preempted, Stopped
from jaxtrain.runtime.watchdog import Watchdog
from jaxtrain.task import Task, is_torch_module
from jaxtrain.train import evaluation, run_dir
from jaxtrain.train.checkpoint import init_from
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.compilation import out_of_memory
from jaxtrain.train.compilation.compile_key import differences
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.compilation.flops import model_flops
from jaxtrain.train.init_state import Start, placed_shape
from jaxtrain.train.input_pipeline import InputPipeline
from jaxtrain.train.loop.loop import AfterEvaluation, Loop
from jaxtrain.train.resolve_task import resolve_task, task_of_module, with_defaults
from jaxtrain.train.step.train_step import StackedMetrics, Step, make_train_step, repeat
from jaxtrain.train.tracking.throughput import StepCost
from jaxtrain.train.tracking.tracker import Tracker
from torch_bridge import state_dict as bridge


class Trainer:
    """Trains a flax model on torch Datasets (or arrays).

    model: an nnx.Module or a torch.nn.Module of your own, or None to let the task build it, sharded from the start. It
    holds the trained weights at the end; a torch module is converted (docs/from_torch.md) and stays torch's.
    train_dataset, val_dataset: torch Datasets, mappings of arrays or sequences; None takes the task's own.
    config: a TrainingConfig. task: a Task or its name, `config.task` if left out. loss: (model, batch, rngs) -> a
    value per sample, a scalar or task.Loss, for a model without a task; batches are dicts, "0", "1", ... for tuples.
    For a torch module: a torch loss module, a torch function of (output, batch), or None for the loss that the module
    returns. devices: all there are, if left out. abstract: shapes and shardings only, to compile for devices that are
    elsewhere.
    Raises UserError for everything that the user can mend.
    """

    def __init__(
        self,
        model: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        config: TrainingConfig | None = None,
        *,
        task: Task | str | None = None,
        loss: Callable | None = None,
        devices: list | None = None,
        abstract: bool = False,
    ):
        config = TrainingConfig() if config is None else config
        self.user_model = model
        if is_torch_module(model):
            train_dataset = None if train_dataset is None else as_source(train_dataset, "train")
            task, model = task_of_module(model, train_dataset, config, loss, task), None
        self.task = resolve_task(task, loss, config)
        self.config = with_defaults(self.task, config)
        self.folder = run_dir.folder_of(self.config)
        self.preemption = PREEMPTION
        compile_cache.enable()
        prng.install()
        host_memory.one_arena()
        self.compile_count = compile_cache.watch()
        jax.config.update("jax_default_matmul_precision", _MATMUL[self.config.precision.matmul])

        self.precision = POLICIES[self.config.precision.policy]
        interrupted = lambda: self.preemption.due
        with cpu_threads.limited(None if abstract else self.config.shard.threads):  # a run's; abstract: its owner's
            self.data = InputPipeline(
                self.task, self.config, train_dataset, val_dataset, interrupted
            )  # before JAX's backend
            self.config = self.data.config
            self.layout = make_layout(self.config.shard, self.task.shard_rules, devices)
        self.data.lay_out(self.layout)
        self._programs: dict[tuple, Any] = {}  # compiled, by what they do; variants share them
        self.start = Start(self.task, self.resolved, self.layout, model)
        self.model_def, self.optimizer = self.start.model_def, self.start.optimizer
        self._make_schedule()
        if abstract:
            self.state = self.start.abstract()
        else:
            self._start_afresh(model)

    # --- assembly -----------------------------------------------------------------------------------------------

    @property
    def train_loader(self) -> Loader:
        return self.data.train_loader

    @property
    def total_steps(self) -> int:
        return self.data.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self.data.steps_per_epoch

    def source(self, split: str) -> Any:
        """The dataset of a split; None where there is none."""
        return self.data.source(split)

    def columns(self, loader: Loader) -> dict[str, jax.Array]:
        """The dataset on the devices, where it lives there."""
        return self.data.columns(loader)

    @property
    def resolved(self) -> TrainingConfig:
        """The config with train.steps filled in: schedules of a task need the length of the run."""
        train = self.config.train.model_copy(update={"steps": self.total_steps})
        return self.config.model_copy(update={"train": train})

    def _make_schedule(self) -> None:
        optim = self.config.optim
        self.schedule = schedules.build(optim.schedule, optim.lr, self.total_steps, self.steps_per_epoch)
        if self.task.schedule is not None:
            self.schedule = self.task.schedule(self.resolved, self.schedule, self.steps_per_epoch)

    def _start_afresh(self, model: nnx.Module | None = None) -> None:
        """A new state: of the user's model where it is given, else as the task starts."""
        self.state = self.start.state(self.config.seed, model)
        if model is None and self.task.initial_weights is not None:
            weights = self.task.initial_weights(self.config)
            if weights is not None:
                self.load_state_dict(weights, strict=False)

    def variant(self, config: TrainingConfig) -> "Trainer":
        """A trainer at the start of another run, which shares this one's data and compiled programs.

        config: of the same code; numbers (Task.traced_hparams), rates, schedule and run folder may differ. Raises
        ValueError for any other. A user's own model is not built anew, so a trainer that was given one has no variants.
        """
        config = with_defaults(self.task, config)
        if self.user_model is not None:
            raise ValueError("a variant starts from fresh weights; this trainer was given a model")
        changed = differences(self.config, config, self.task)
        if changed:
            raise ValueError(f"a variant compiles nothing, but {', '.join(changed)} differ in more than numbers")
        other = copy.copy(self)
        other.config, other.folder = config, run_dir.folder_of(config)
        other._evaluator_cache = {}
        other.data = self.data.variant(config)
        other._make_schedule()
        other._start_afresh()
        return other

    # --- what a run does ----------------------------------------------------------------------------------------

    def train(self, resume: str = "auto", after_evaluation: AfterEvaluation | None = None) -> dict[str, Any]:
        """Train to the end of the config, resuming what the run folder holds.

        Returns best_val_loss, train_history and val_history (one dict per epoch or evaluation), as the torch
        originals do. resume: "auto", "never" (refuses a folder that holds checkpoints), or another run's folder.
        after_evaluation: (step, validation metrics) -> True ends the run there.
        """
        with self._locked():
            history = self._train_locked(resume, after_evaluation)
        self.write_back()
        return history

    def _train_locked(self, resume: str, after_evaluation: AfterEvaluation | None) -> dict[str, Any]:
        started = time.time()
        tracker = Tracker(self.folder, self.config, active=jax.process_index() == 0)
        watchdog = Watchdog(self.folder, self.config.train.hang_timeout_s)
        watchdog.start()
        failed = True
        try:
            loop = self._prepare(tracker, resume, watchdog)
            history = loop.run(after_evaluation)
            if jax.process_index() == 0:
                run_dir.write_summary(self.folder, self.summary(loop, time.time() - started), self.layout.mesh.size)
            failed = False
        except (Preempted, Stopped):
            failed = False
            raise
        except Exception as error:
            lost = watchdog.find_lost_process() if jax.process_count() > 1 and not isinstance(error, UserError) else ""
            if lost:
                raise ProcessLostError(
                    f"{lost}. Start the same command again to go on from the last checkpoint"
                ) from error
            raise
        finally:
            watchdog.stop()
            tracker.close(failed)
            self.data.close()
        return history

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The run folder is this run's alone; process 0 holds the lock for all."""
        lock = FolderLock(self.folder)
        broadcast_from_process_zero("lock", lock.acquire)
        try:
            yield
        finally:
            lock.release()

    def _prepare(self, tracker: Tracker, resume: str, watchdog: Watchdog) -> Loop:
        config = self.config
        checkpoints = self.checkpoints(tracker.warn)
        loop = Loop(self, tracker, checkpoints, watchdog)
        origin, step = self._origin(checkpoints, resume, tracker)
        if step is not None:
            self.state = origin.restore(step, self.state)
            loop.restore(origin.meta(step))
            tracker.info(f"resumed from {origin.folder / str(step)} at step {step} of {self.total_steps}")
            for change in run_dir.changes(self.folder, self.config):
                tracker.info(f"changed since then: {change}")
            if step == self.total_steps:
                tracker.info("this run is complete: more train.epochs go on with it, another run.dir starts a new one")
        elif config.init_from is not None:
            loop.start_from(init_from.apply(self, config.init_from))
        if origin is not checkpoints:
            checkpoints.newest = None  # the folder itself holds nothing yet
        tracker.rewind(int(self.state.step), loop.evaluation_due)
        if jax.process_index() == 0:
            checkpoints.clear_unfinished()
            run_dir.write_start(self.folder, config, self.layout.mesh.size)
        return loop

    def checkpoints(self, warn: Callable[[str], None] = print, folder: pathlib.Path | None = None) -> Checkpoints:
        """Those of the run folder, or of another run's. warn: hears of trouble with them."""
        keep, evaluate = self.config.checkpoint, self.config.evaluation
        place = (folder or self.folder) / "checkpoints"
        return Checkpoints(place, keep.keep_last, keep.keep_best, evaluate.metric, evaluate.mode, warn)

    def _origin(self, checkpoints: Checkpoints, resume: str, tracker: Tracker) -> tuple[Checkpoints, int | None]:
        """Where the run goes on from: the newest checkpoint that is whole, of its own folder or of another run's."""
        if resume not in ("auto", "never"):
            other = self.checkpoints(tracker.warn, pathlib.Path(resume))
            step = broadcast_from_process_zero("resume", lambda: other.newest_good(set_aside=False))
            if step is None:
                raise UserError(f"--resume {resume}: no checkpoint under {other.folder}")
            return other, step
        found = broadcast_from_process_zero("latest", checkpoints.latest)
        if resume == "never" and found is not None:
            raise UserError(
                f"{self.folder}: holds checkpoints up to step {found} and --resume never would start over them; choose "
                "another run.dir, or move the folder away"
            )
        return checkpoints, broadcast_from_process_zero("resume", checkpoints.newest_good)

    def train_step(self, steps: int = 1) -> Compiled:
        """The compiled step: (state, batch, hyper, columns) -> (state, metrics), several steps in one call."""
        return self._compiled(self.step(), steps)

    def packed_train_step(self, steps: int = 1) -> tuple[Compiled, StackedMetrics]:
        """The same with its metrics as one vector, and who knows the names of its elements."""

        def make() -> tuple[Compiled, StackedMetrics]:
            packed = StackedMetrics(self.step())
            return self._compiled(packed, steps), packed

        return self.cached(("train", steps), make)

    def cached(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What this trainer or a variant of it compiled under this key, or compiles now."""
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    @property
    def compilations(self) -> int:
        """Training steps compiled by this trainer and its variants: one per number of steps in a call, and shape."""
        return sum(len(made[0].programs) for key, made in self._programs.items() if key[0] in ("train", "population"))

    def step(self) -> Step:
        """One training step, not compiled."""
        return make_train_step(self.task, self.resolved, self.model_def, self.optimizer, self.precision, self.layout)

    def _compiled(self, step: Step, steps: int) -> Compiled:
        on_cpu = self.layout.mesh.devices.flat[0].platform == "cpu"  # where a loop costs nothing
        repeated = repeat(step, steps, as_loop=on_cpu)
        jitted = self.jit(repeated, donate_argnums=0, out_shardings=(self.start.shardings, self.layout.replicated))
        shapes = batch_shapes(self.source("train"))
        explain = functools.partial(_out_of_memory, self.config, self.layout.mesh.size)
        return Compiled(jitted, "the training step", batch=1, shapes=shapes, out_of_memory=explain)

    def jit(self, function: Callable, **options: Any) -> Any:
        """jax.jit; on GPUs with the operations that `deterministic` asks for, and with what hides communication."""
        devices = self.layout.mesh.devices
        if devices.flat[0].platform != "gpu":
            return jax.jit(function, **options)
        deterministic = {"xla_gpu_deterministic_ops": True} if self.config.deterministic else {}
        wanted = deterministic | xla_flags.options(devices.size)
        return jax.jit(function, compiler_options=wanted or None, **options)

    def work(self) -> StepCost:
        """What one step is worth, but for its FLOPs, which the compiled step knows."""
        precision = self.config.precision
        peak = peak_flops(jax.devices()[0].device_kind, self.precision.compute, precision.matmul)
        return StepCost(self.config.data.batch_size, None, self.layout.mesh.size, peak)

    def model_flops(self, flops: float) -> float:
        return model_flops(flops, self.config.train.remat)

    def abstract_arguments(self) -> tuple:
        """Shapes and shardings of the training step's arguments, from the first sample of the data."""
        accumulate = self.config.train.accumulate_steps
        loader = self.train_loader
        columns = (
            jax.tree.map(lambda c: placed_shape(c, self.layout.replicated), loader.source.columns)
            if loader.on_device
            else {}
        )
        sharding = self.layout.batch(leading=1)
        size = self.config.data.batch_size // accumulate
        one = loader.host_batch(0, rows=np.arange(1))
        batch = jax.tree.map(
            lambda row: jax.ShapeDtypeStruct((accumulate, size, *row.shape[1:]), row.dtype, sharding=sharding), one
        )
        hyper = jax.tree.map(lambda v: placed_shape(v, self.layout.replicated), self.host_hyper())
        return self.state, batch, hyper, columns

    def hyper(self, lr_scale: float = 1.0) -> dict:
        """What the step takes as numbers, not as code: a change compiles nothing anew."""
        return jax.device_put(self.host_hyper(lr_scale), self.layout.replicated)

    def host_hyper(self, lr_scale: float = 1.0) -> dict:
        """The same in numpy."""
        optim = self.config.optim
        rates = optimizers.rates(optim, set(self.optimizer.groups.values()) or {"default"})
        floats = {"factor": schedules.table(self.schedule, self.total_steps), "lr_scale": lr_scale, **rates}
        floats |= {} if optim.clip_norm is None else {"clip_norm": optim.clip_norm}
        floats = jax.tree.map(lambda value: np.asarray(value, np.float32), floats)
        return floats | {"numbers": traced_hparams.given(self.config, self.task.traced_hparams)}

    def traced_hparams(self) -> dict[str, jax.Array]:
        """The settings that the step takes as arrays (Task.traced_hparams)."""
        return jax.device_put(traced_hparams.given(self.config, self.task.traced_hparams), self.layout.replicated)

    def evaluate(self, split: str = "validation") -> dict[str, float]:
        """Metrics of the current weights (the averaged ones where there are) on a whole split."""
        if split not in self._evaluators:
            self._evaluators[split] = self._make_evaluator(split)
        return self._evaluators[split]()

    @property
    def _evaluators(self) -> dict[str, Callable[[], dict[str, float]]]:
        return self.__dict__.setdefault("_evaluator_cache", {})

    def evaluated_params(self) -> dict[str, jax.Array]:
        """The averaged weights where there are and `evaluation.averaged` asks for them, else those that train."""
        return (self.state.ema if self.config.evaluation.averaged else {}) or self.state.params

    def _make_evaluator(self, split: str) -> Callable[[], dict[str, float]]:
        source, stream, loader = self.data.evaluation(split)
        columns, numbers = self.columns(loader), self.traced_hparams()

        def make() -> Compiled:
            jitted = self.jit(self.evaluation_step(), out_shardings=self.layout.replicated)
            return Compiled(jitted, "the evaluation step", batch=3, shapes=batch_shapes(source))

        compiled = self.cached(("evaluate", split), make)

        def run() -> dict[str, float]:
            params = self.evaluated_params()
            calls = ((step, 1) for step in range(stream.steps_per_epoch or UNKNOWN_STEPS))

            def results():
                for _, _, batch in loader.batches(calls):
                    self.preemption.proceed()
                    yield compiled(params, self.state.frozen, self.state.buffers, batch, columns, numbers)
                self.preemption.proceed()  # batches may have ended because it would not

            return evaluation.compute(self.task, self.config, *evaluation.collect(results()))

        return run

    def evaluation_step(self) -> Callable:
        """(params, frozen, buffers, placed batch, columns, numbers) -> Statistics, not compiled."""
        step = evaluation.make_eval_step(self.task, self.config, self.model_def, self.precision)

        def first_micro(params, frozen, buffers, batch, columns, numbers):
            return step(params, frozen, buffers, jax.tree.map(lambda leaf: leaf[0], batch), columns, numbers)

        return first_micro

    def describe(self) -> str:
        """What the run would do, in a few lines."""
        trained = sum(value.size for value in self.state.params.values())
        fixed = sum(value.size for value in self.state.frozen.values())
        splits = {name: self.source(name) for name in ("train", "validation", "test")}
        sizes = ", ".join(f"{name} {describe_size(source)}" for name, source in splits.items() if source is not None)
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.layout.mesh.shape.items())
        return (
            f"task {self.config.task}: {trained:,} trained parameters, {fixed:,} frozen\n"
            f"samples: {sizes}\n"
            f"steps: {self.total_steps:,} of {self.config.data.batch_size} samples, "
            f"{self.steps_per_epoch:,} per epoch\n"
            f"mesh: {mesh} ({self.layout.strategy}), precision {self.config.precision.policy}\n"
            f"run folder: {self.folder}"
        )

    # --- weights ------------------------------------------------------------------------------------------------

    def model(self) -> nnx.Module:
        """The model with the current weights (the averaged ones where there are)."""
        return self.model_def.merge(self.state.ema or self.state.params, self.state.frozen, self.state.buffers)

    def state_dict(self) -> dict[str, np.ndarray]:
        """The current weights under torch's keys, as numpy arrays; `torch_bridge.files.save` writes them."""
        return bridge.state_dict(self.model())

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, source: str = "the state dict"
    ) -> tuple[list[str], list[str]]:
        """Take weights from a torch state dict (tensors, arrays or Leaves); gives its missing and unexpected keys.

        Raises StateDictMismatch, which names `source`, where they do not fit.
        """
        model = self.model_def.merge(self.state.params, self.state.frozen, self.state.buffers)
        averaged = self.state.ema
        self.state = self.state.replace(params={}, frozen={}, buffers={}, ema={})  # an old array goes as its heir comes
        try:
            keys = bridge.load_state_dict(model, state, strict, source)
            averaged = averaged and jax.tree.map(jnp.copy, self.model_def.split(model)[0])
        finally:
            params, frozen, buffers = self.model_def.split(model)
            self.state = self.state.replace(params=params, frozen=frozen, buffers=buffers, ema=averaged)
        return keys

    def write_back(self) -> None:
        """The current weights (the averaged ones where there are) into the model that the user gave, if any."""
        if is_torch_module(self.user_model):
            from torch_bridge.from_torch import write_back

            write_back(self.model(), self.user_model)
        elif self.user_model is not None:
            nnx.update(self.user_model, nnx.state(self.model()))

    def summary(self, loop: Loop, seconds: float) -> dict[str, Any]:
        """What summary.json tells of a run that ended after so many seconds."""
        return {
            "task": self.config.task,
            "best": loop.best_metrics,
            "final": loop.last_metrics,
            "steps": int(self.state.step),
            "epochs": round(int(self.state.step) / self.steps_per_epoch, 3),
            "seconds": round(seconds, 3),
            "throughput": {"samples_per_s": round(loop.samples_per_s, 1)},
            "parameters": sum(p.size for p in self.state.params.values()),
            "compile": str(self.compile_count),
        }


class ProcessLostError(UserError):
    """Another process of the run was killed, stopped or cut off."""

    exit_code = 1


def _out_of_memory(config: TrainingConfig, devices: int, arguments: tuple, program: Any) -> str:
    return out_of_memory.explain(config, out_of_memory.measure(arguments[0], arguments[3], program), devices)


UNKNOWN_STEPS = 1 << 40  # of a pass whose end only its dataset knows
_MATMUL = {"default": None, "high": "tensorfloat32", "highest": "float32"}
