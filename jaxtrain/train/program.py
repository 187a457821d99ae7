"""Compiled functions of a run (training step, evaluation) with its hyper-parameters, state, weights and data."""

import copy
import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import TrainingConfig
from jaxtrain.data.example import first_samples
from jaxtrain.data.loader import Loader
from jaxtrain.errors import UserError
from jaxtrain.nn import cudnn
from jaxtrain.optim import groups, schedules
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.runtime import compile_cache, cpu_threads, host_memory, jax_settings, prng, traced_hparams, xla_flags
from jaxtrain.runtime.mesh import make_layout
from jaxtrain.runtime.peak_flops import peak_flops
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.runtime.preemption import PREEMPTION
from jaxtrain.task import Task
from jaxtrain.train.compilation import micro_batch, offered, out_of_memory, padding
from jaxtrain.train.compilation.compile_key import differences
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.compilation.flops import StepCost
from jaxtrain.train.input_pipeline import InputPipeline
from jaxtrain.train.step import evaluation
from jaxtrain.train.step.accumulation import refuse_sums
from jaxtrain.train.step.init_state import Start, for_average, placed_shape
from jaxtrain.train.step.train_step import StackedMetrics, Step, make_train_step, repeat
from jaxtrain.train.user import metrics as user_metrics
from jaxtrain.train.user.parts import UserParts
from jaxtrain.train.user.resolve_task import with_defaults
from torch_bridge import state_dict as bridge

UNKNOWN_STEPS = 1 << 40  # for a pass over a dataset of unknown length
MATMUL = {"default": None, "high": "tensorfloat32", "highest": "float32"}


class Program:
    """Compiled steps of one run; `Trainer`, the loop and the searches use it.

    task, config: config has the task's own sections and the batch size of a source that decides it. data: sources and
    loaders. layout: the mesh. state: the TrainState, replaced by every step. Arguments as for Trainer; parts: the
    user's own optimizer, schedule and metrics.
    """

    def __init__(
        self,
        task: Task,
        config: TrainingConfig,
        train_dataset: Any = None,
        val_dataset: Any = None,
        model: nnx.Module | None = None,
        devices: list | None = None,
        abstract: bool = False,
        parts: UserParts | None = None,
    ):
        self.task, self.preemption = task, PREEMPTION
        parts = parts or UserParts()
        self.given, self.given_schedule, self.metrics = parts.given, parts.schedule, parts.metrics
        self.compile_count = _prepare_process(config)
        self.precision = POLICIES[config.precision.policy]
        interrupted = lambda: self.preemption.due
        with cpu_threads.limited(None if abstract else config.shard.threads):  # abstract: the caller sets the threads
            # Before JAX's backend starts: worker processes may be forked.
            self.data = InputPipeline(task, config, train_dataset, val_dataset, interrupted)
            self.config = self.data.config
            rules = task.shard_rules(self.config) if self.config.shard.tensor > 1 else {}
            offered.check_tokens(task, self.config)
            self.layout = make_layout(self.config.shard, rules, devices)
            offered.check_precision(self.config, self.layout)
        self.data.lay_out(self.layout)
        self._programs: dict[tuple, Any] = {}  # compiled functions by key; variants share them
        self._evaluators: dict[str, Callable[[], dict[str, float]]] = {}
        self.announce: Callable[[str], None] = lambda line: None  # replaced by a run: writes to its log
        self.beat: Callable[[], None] = lambda: None  # replaced by a run: tells its watchdog of progress
        self.start = Start(task, self.resolved, self.layout, model, self.given)
        self.model_def, self.optimizer = self.start.model_def, self.start.optimizer
        self._make_schedule()
        if abstract:
            self.state = self.start.abstract()
            return
        self._start_afresh(model)
        self.accumulate(micro_batch.steps_of(self))
        self.train_loader.batch_shapes = padding.choose(self, "train", self.train_loader)
        user_metrics.settle(self)
        if self.config.train.accumulate_steps > 1 and not task.pads_batches:
            refuse_sums(task, self.resolved, self.model_def, self.state, self.data.example())

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

    @property
    def has_validation(self) -> bool:
        return self.data.source("validation") is not None

    @property
    def has_own_schedule(self) -> bool:
        """Tell whether the schedule is the user's object or, in a run made in Python, the task's."""
        return self.given_schedule is not None or (self.config.task is None and self.task.schedule is not None)

    @property
    def resolved(self) -> TrainingConfig:
        """Return the config with train.steps filled in: a task's schedule needs the length of the run."""
        train = self.config.train.model_copy(update={"steps": self.total_steps})
        return self.config.model_copy(update={"train": train})

    def columns(self, loader: Loader) -> dict[str, jax.Array]:
        """Return the dataset's columns on the devices; {} if it stays on the host."""
        return self.data.columns(loader)

    def _make_schedule(self) -> None:
        optim = self.config.optim
        self.schedule = schedules.build(optim.schedule, optim.lr, self.total_steps, self.steps_per_epoch)
        if self.task.schedule is not None:
            self.schedule = self.task.schedule(self.resolved, self.schedule, self.steps_per_epoch)
        if self.given_schedule is not None:
            self.schedule = self.given_schedule

    def set_lr(self, lr: float) -> None:
        """Set another peak learning rate; nothing is recompiled."""
        optim = self.config.optim.model_copy(update={"lr": lr})
        self.config = self.config.model_copy(update={"optim": optim})
        self._make_schedule()

    def _start_afresh(self, model: nnx.Module | None = None) -> None:
        """Set the initial state: of the user's model if given, else of the task's model and initial weights."""
        self.state = self.start.state(self.config.seed, model)
        if model is None and self.task.initial_weights is not None:
            weights = self.task.initial_weights(self.config)
            if weights is not None:
                self.load_state_dict(weights, strict=False)
        if self.given is not None:
            self.state = self.state.replace(opt_state=self.given.taken_over(self.state.opt_state))

    def variant(self, config: TrainingConfig, train: Any = None, validation: Any = None) -> "Program":
        """Return a program at the start of another run, which shares this one's data and compiled functions.

        config: may differ only in numbers, rates, schedule and run folder, which need no new compilation. Raises
        ValueError for any other difference. train, validation: sources of the same sizes, in place of this program's.
        """
        config = with_defaults(self.task, config)
        changed = differences(self.config, config, self.task)
        if changed:
            raise ValueError(f"a variant compiles nothing, but {', '.join(changed)} differ in more than numbers")
        other = copy.copy(self)
        other.config = config
        other._evaluators = {}
        other.data = self.data.variant(config, train, validation)
        other._make_schedule()
        other._start_afresh()
        return other

    # --- compiled functions -------------------------------------------------------------------------------------

    def step(self, resting: Set[str] = frozenset()) -> Step:
        """Return the training step, not compiled. resting: parameters that it does not update."""
        return make_train_step(
            self.task, self.resolved, self.model_def, self.optimizer, self.precision, self.layout, resting
        )

    def resting(self, step: int) -> frozenset[str]:
        """Return the parameters that are not updated at a step, because their group trains in other epochs."""
        optim, epoch = self.config.optim, step // self.steps_per_epoch
        if not groups.boundaries(optim):
            return frozenset()
        asleep = {name for name, group in optim.groups.items() if groups.rests(group, epoch)}
        named = {key: label.partition(groups.DEPTH)[0] for key, label in self.optimizer.groups.items()}
        return frozenset(key for key, name in named.items() if name in asleep)

    def train_step(self, steps: int = 1) -> Compiled:
        """Return the compiled step (state, batch, hyper, columns) -> (state, metrics), for `steps` steps per call."""
        return self._compiled(self.step(), steps)

    def packed_train_step(
        self, steps: int = 1, resting: frozenset[str] = frozenset()
    ) -> tuple[Compiled, StackedMetrics]:
        """Return the compiled step with its metrics as one vector, and the object that has the elements' names."""

        def make() -> tuple[Compiled, StackedMetrics]:
            packed = StackedMetrics(self.step(resting))
            return self._compiled(packed, steps), packed

        return self.cached(("train", steps, resting), make)

    def cached(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return the cached object of this key, made by this program or a variant of it; else call `make`."""
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    @property
    def compilations(self) -> int:
        """Return how many training steps this program and its variants compiled: one per shape and steps per call."""
        return sum(len(made[0].programs) for key, made in self._programs.items() if key[0] in ("train", "population"))

    def _compiled(self, step: Callable, steps: int) -> Compiled:
        on_cpu = self.layout.mesh.devices.flat[0].platform == "cpu"  # where a loop costs no time
        repeated = repeat(step, steps, self.precision, as_loop=on_cpu)
        jitted = self.jit(repeated, donate_argnums=0, out_shardings=(self.start.shardings, self.layout.replicated))
        explain = functools.partial(_out_of_memory, self.config, self.layout.mesh.size)
        return Compiled(jitted, "the training step", batch=1, shapes=self.train_shapes, out_of_memory=explain)

    @property
    def train_shapes(self) -> int:
        """Return the largest number of shapes that the training batches may have."""
        return self.data.shapes(self.data.source("train"), self.train_loader.stream, self.train_loader)

    def jit(self, function: Callable, **options: Any) -> Any:
        """Return jax.jit(function); on GPUs with the options for `deterministic` and for overlapping communication."""
        devices = self.layout.mesh.devices
        if devices.flat[0].platform != "gpu":
            return jax.jit(function, **options)
        wanted = xla_flags.options(devices.size, self.config.deterministic)
        traced = cudnn.traced_as(function, xla_flags.is_deterministic(self.config.deterministic))
        return jax.jit(traced, compiler_options=wanted or None, **options)

    def work(self) -> StepCost:
        """Return the cost of one step without its FLOPs, which are known only once it is compiled."""
        precision = self.config.precision
        peak = peak_flops(jax.devices()[0].device_kind, self.precision.compute, precision.matmul)
        return StepCost(self.config.data.batch_size, None, self.layout.mesh.size, peak)

    def accumulate(self, steps: int) -> None:
        """Cut every batch into `steps` micro-batches from now on."""
        if steps != self.config.train.accumulate_steps:
            train = self.config.train.model_copy(update={"accumulate_steps": steps})
            self.config = self.data.config = self.config.model_copy(update={"train": train})
            self.data.lay_out(self.layout)

    def abstract_arguments(self, steps: int = 1, accumulate: int | None = None, batch_size: int | None = None) -> tuple:
        """Return shapes and shardings of the training step's arguments, derived from the first sample. steps: per call.
        accumulate, batch_size: default: the config's."""
        accumulate = accumulate or self.config.train.accumulate_steps
        loader = self.train_loader
        columns = (
            jax.tree.map(lambda c: placed_shape(c, self.layout.replicated), loader.source.columns)
            if loader.on_device
            else {}
        )
        leading = (accumulate,) if steps == 1 else (steps, accumulate)
        sharding = self.layout.batch(leading=len(leading))
        size = (batch_size or self.config.data.batch_size) // accumulate
        one = first_samples(loader, 1)
        batch = jax.tree.map(
            lambda row: jax.ShapeDtypeStruct((*leading, size, *row.shape[1:]), row.dtype, sharding=sharding), one
        )
        hyper = jax.tree.map(lambda v: placed_shape(v, self.layout.replicated), self.host_hyper())
        return self.state, batch, hyper, columns

    # --- hyper-parameters ---------------------------------------------------------------------------------------

    def hyper(self, lr_scale: float = 1.0) -> dict:
        """Return the hyper-parameters that enter the step as arrays; changing one recompiles nothing."""
        return jax.device_put(self.host_hyper(lr_scale), self.layout.replicated)

    def host_hyper(self, lr_scale: float = 1.0) -> dict:
        """Return the hyper-parameters as numpy arrays."""
        optim = self.config.optim
        floats: dict[str, Any] = {"lr_scale": lr_scale}
        floats |= {} if self.optimizer.clip_norm is None else {"clip_norm": optim.clip_norm}
        if self.given is None:
            floats |= optimizers.rates(optim, set(self.optimizer.groups.values()) or {"default"})
            floats["factor"] = schedules.table(self.schedule, self.total_steps)
        floats = jax.tree.map(lambda value: np.asarray(value, np.float32), floats) | {"numbers": self._numbers}
        return floats | ({} if self.given is None else self.given.hyper(self.total_steps, self.steps_per_epoch))

    def traced_hparams(self) -> dict[str, jax.Array]:
        """Return the numbers that the step takes as arrays (Task.traced_hparams, Task.graph_numbers)."""
        return jax.device_put(self._numbers, self.layout.replicated)

    @property
    def _numbers(self) -> dict[str, Any]:
        return traced_hparams.given(self.config, self.task.traced_hparams) | dict(self.task.graph_numbers(self.config))

    # --- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self, split: str = "validation") -> dict[str, float]:
        """Return the metrics of the current weights (see `evaluated_params`) on a whole split."""
        if split not in self._evaluators:
            self._evaluators[split] = self._make_evaluator(split)
        return self._evaluators[split]()

    def forget_columns(self, split: str) -> None:
        """Make the next evaluation of a split place its data on the devices anew."""
        self._evaluators.pop(split, None)

    def evaluated_params(self) -> dict[str, jax.Array]:
        """Return the averaged weights if they exist and `evaluation.averaged` is set, else the trained weights."""
        return (self.state.ema if self.config.evaluation.averaged else {}) or self.state.params

    def _make_evaluator(self, split: str) -> Callable[[], dict[str, float]]:
        source, stream, loader = self.data.evaluation(split)
        loader.batch_shapes = padding.choose(self, split, loader)
        columns, numbers, own = self.columns(loader), self.traced_hparams(), self.metrics

        def make() -> Compiled:
            jitted = self.jit(self.evaluation_step(keep=own is not None), out_shardings=self.layout.replicated)
            return Compiled(jitted, "the evaluation step", batch=3, shapes=self.data.shapes(source, stream, loader))

        compiled = self.cached(("evaluate", split), make)

        def run() -> dict[str, float]:
            params = self.evaluated_params()
            most = 1 if self.config.train.fast_dev_run else stream.steps_per_epoch or UNKNOWN_STEPS
            calls = ((step, 1) for step in range(most))

            def results():
                for _, _, batch in loader.batches(calls):
                    self.preemption.proceed()
                    self.beat()
                    if loader.batch_shapes is not None and not compiled.knows(
                        params, self.state.frozen, self.state.buffers, batch, columns, numbers
                    ):
                        self.announce(f"compiled for evaluation batches of {padding.shape_of(batch)}")
                    found = compiled(params, self.state.frozen, self.state.buffers, batch, columns, numbers)
                    if own is not None:
                        found, kept = found
                        own.update(*kept)
                    yield found
                self.preemption.proceed()  # batches may have ended because of an interruption

            if own is not None:
                own.begin()
            sums, rows = evaluation.collect(results())
            if not sums:
                raise UserError(
                    f"the {split} dataset gave no sample, so there is nothing to evaluate. Is it a stream that was "
                    "read before? Its __iter__ has to begin anew at each call (return a new iterator, not self). To "
                    "train without evaluations, pass None"
                )
            metrics = evaluation.compute(self.task, self.config, sums, rows)
            return metrics if own is None else metrics | own.compute()

        return run

    def evaluation_step(self, keep: bool = False) -> Callable:
        """Return (params, frozen, buffers, placed batch, columns, numbers) -> Statistics, not compiled. keep: see
        make_eval_step."""
        step = evaluation.make_eval_step(self.task, self.config, self.model_def, self.precision, self.layout, keep)

        def first_micro(params, frozen, buffers, batch, columns, numbers):
            return step(params, frozen, buffers, jax.tree.map(lambda leaf: leaf[0], batch), columns, numbers)

        return first_micro

    # --- weights ------------------------------------------------------------------------------------------------

    def model(self) -> nnx.Module:
        """Return the model with the current weights (the averaged ones if they exist)."""
        return self.model_def.merge(self.state.ema or self.state.params, self.state.frozen, self.state.buffers)

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, source: str = "the state dict"
    ) -> tuple[list[str], list[str]]:
        """Load weights from a torch state dict (tensors, arrays or LazyArrays); return missing and unexpected keys.

        Raises StateDictMismatch, which names `source`, if they do not fit.
        """
        model = self.model_def.merge(self.state.params, self.state.frozen, self.state.buffers)
        averaged = self.state.ema
        # From here only the model refers to its arrays, so that each is freed before its replacement is loaded.
        self.state = self.state.replace(params={}, frozen={}, buffers={}, ema={})
        try:
            keys = bridge.load_state_dict(model, state, strict, source)
            averaged = averaged and jax.tree.map(jnp.copy, for_average(self.model_def.split(model)[0]))
        finally:
            params, frozen, buffers = self.model_def.split(model)
            self.state = self.state.replace(params=params, frozen=frozen, buffers=buffers, ema=averaged)
        return keys


def _prepare_process(config: TrainingConfig) -> Any:
    """Apply the process-wide settings; return a counter of compilations from now on."""
    jax_settings.check()
    compile_cache.enable()
    host_memory.one_arena()
    prng.install()
    jax.config.update("jax_default_matmul_precision", MATMUL[config.precision.matmul])
    return compile_cache.watch()


def _out_of_memory(config: TrainingConfig, devices: int, arguments: tuple, program: Any) -> str:
    return out_of_memory.explain(config, out_of_memory.measure(arguments[0], arguments[3], program), devices)
