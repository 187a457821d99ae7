"""Train many runs at once: their states are stacked, and the compiled step is vmapped over them."""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config_io
from jaxtrain.data import row_keys
from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader
from jaxtrain.errors import UserError
from jaxtrain.optim import groups
from jaxtrain.runtime import host_memory
from jaxtrain.task import Statistics
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.loop.callbacks import Callbacks
from jaxtrain.train.loop.run_record import NotFiniteError, RunRecord
from jaxtrain.train.program import UNKNOWN_STEPS, Program
from jaxtrain.train.step import evaluation
from jaxtrain.train.step.train_step import StackedMetrics, repeat
from jaxtrain.train.tracking.system_metrics import SystemMetrics
from jaxtrain.train.tracking.tracker import Tracker

Prune = Callable[[int, Mapping[int, dict[str, float]]], Iterable[int]]


def keep_all(step: int, metrics: Mapping[int, dict[str, float]]) -> Iterable[int]:
    """Prune nothing."""
    return ()


@dataclasses.dataclass
class Outcome:
    """Result of a member. history: as from Trainer.train. error: what ended it, if it did not finish."""

    program: Program
    history: dict[str, Any]
    error: Exception | None = None


class Member:
    """One run of a population, in memory: its program and record.

    best: state and step of its best evaluation so far. ended: nothing more is recorded, although the common program may
    still train it. state: its last one, once it has ended.
    """

    def __init__(self, program: Program, record: RunRecord | None = None):
        self.program = program
        self.record = MemoryRecord(program) if record is None else record
        self.best: tuple[Any, int] | None = None
        self.error: Exception | None = None
        self.ended = self.pruned = False
        self.state: Any = None

    def begin(self, system: SystemMetrics) -> None:
        self.record.start_clock(0, system)

    def evaluated(self, step: int, metrics: dict[str, float], state: Callable[[], Any]) -> None:
        """Record an evaluation; if it is the best so far, keep the member's state, which `state()` returns."""
        self.record.step = step
        if self.record.on_evaluation_end(step, metrics):
            self.best = state(), step

    def end(self, step: int, state: Any, evaluated: bool) -> None:
        """Keep the last state. evaluated: it is the state of the last evaluation."""
        self.record.step = step
        self.state, self.ended = state, True


class MemoryRecord(RunRecord):
    """A record that is written nowhere."""

    def __init__(self, program: Program):
        silent: Any = Silent()
        super().__init__(program, silent, silent, Callbacks())
        self.cadence.log_due = lambda step: False  # a line is made of the machine's load, which takes time to read

    def _skipped(self, step: int, values: dict[str, float]) -> None:
        self.skipped += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step == self.last_skipped + 1 else 1
        self.last_skipped = step
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        if not finite and not self._may_continue():
            raise NotFiniteError(f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}")


class Silent:
    """Stand-in for a tracker and of checkpoints that a member in memory has not."""

    newest = None

    def point(self, *arguments: Any) -> None: ...

    advance = info = warn = point


class FolderMember(Member):
    """A member with a run folder: metrics, checkpoints and summary, as of a run of its own."""

    def __init__(self, program: Program, config: Any = None):
        """config: to write into the run folder, if it is not the program's."""
        self.folder, self.config = program.config.run.folder, config or program.config
        self.tracker = Tracker(self.folder, program.config, True, lines=False)
        self.checkpoints: Checkpoints = run_dir.checkpoints(self.folder, program.config)
        super().__init__(program, RunRecord(program, self.tracker, self.checkpoints, Callbacks()))
        self.best_meta = ""

    def begin(self, system: SystemMetrics) -> None:
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)  # left by a population that was killed
        self.tracker.rewind(0)
        config_io.save(self.config, self.folder / "config.yaml")
        super().begin(system)

    def evaluated(self, step: int, metrics: dict[str, float], state: Callable[[], Any]) -> None:
        super().evaluated(step, metrics, state)
        if self.best is not None and self.best[1] == step:
            self.best_meta = json.dumps(self.record.meta(evaluated=True))  # as text, because the record keeps changing

    def end(self, step: int, state: Any, evaluated: bool) -> None:
        """Write the last checkpoint, the best one and the summary."""
        self.program.state, record = state, self.record
        if self.best is not None and self.best[1] != step:
            self.checkpoints.save(*self.best, json.loads(self.best_meta))
        super().end(step, None, evaluated)
        self.checkpoints.save(state, step, record.meta(evaluated))
        self.checkpoints.wait()
        record.samples_per_s = record.clock.samples_per_s(step)
        summary = record.summary(time.perf_counter() - record.clock.began)
        run_dir.write_summary(self.folder, summary, self.program.layout.mesh.size)
        self.tracker.close()
        self.best = None


class Population:
    """Variants of one program (`Program.variant`), trained together on one device.

    Every member has its own rates, numbers, seed, order of samples, plateau and early stop; its final weights equal
    those of a separate run, up to the order of sums. Unlike a separate run, it has no resume, histograms, pictures and
    train.log. member: `FolderMember`, each in its run folder, or `Member`, in memory. prune: called after every
    evaluation with the step and the metrics of the members that still train, by position; returns the positions of
    those to end. Once at most half of the lanes of the program train, the others are freed: a smaller program goes on.
    Raises UserError for several devices, `optim.lr: auto`, and groups that train in some epochs only.
    """

    def __init__(
        self, programs: Sequence[Program], member: Callable[[Program], Member] = FolderMember, prune: Prune = keep_all
    ):
        first = self.first = programs[0]
        if first.layout.mesh.size > 1:
            raise UserError(f"a population trains on one device, not on {first.layout.mesh.size}: set shard.devices=1")
        if first.config.optim.auto_lr:
            raise UserError("optim.lr: auto is not offered for trials in one program; give a number, or search it")
        if groups.boundaries(first.config.optim):
            raise UserError("optim.groups: trials in one program offer no groups that train in some epochs only")
        self.same_order = len({(program.config.seed, _rows_of(program)) for program in programs}) == 1
        self.members = self.lanes = [member(program) for program in programs]
        self.prune = prune
        self._placed: dict[str, Any] = {}

    @host_memory.kept()
    def train(self) -> list[Outcome]:
        """Train all members to the end of their configs; return their results."""
        system = SystemMetrics()
        for member in self.members:
            member.begin(system)
        calls = list(self.members[0].record.cadence.calls(0))
        state: Any = _stack([member.program.state for member in self.lanes])
        for member in self.lanes:
            member.program.state = None  # else every state would be held twice
        while calls and self.lanes:
            state, step = self._train_lanes(state, calls)
            calls = [call for call in calls if call[0] >= step]
            kept = [k for k, member in enumerate(self.lanes) if not member.ended]
            self.lanes = [self.lanes[k] for k in kept]
            if calls and kept:
                state = jax.jit(lambda state, kept: jax.tree.map(lambda leaf: leaf[kept], state))(state, np.array(kept))
        return [Outcome(member.program, member.record.history(), member.error) for member in self.members]

    def _train_lanes(self, state: Any, calls: list[tuple[int, int]]) -> tuple[Any, int]:
        """Train the lanes until all have ended, or half of them have; return their states and the next step."""
        cadence, total = self.members[0].record.cadence, self.first.total_steps
        hyper = _stack([member.program.hyper(member.record.lr_scale()) for member in self.lanes])
        columns = self._columns("train", self.first.train_loader)
        step, began = calls[0][0], time.perf_counter()
        ends = {first for first, _ in calls} | {total}  # a call may come in several parts
        with contextlib.closing(self._batches(calls)) as batches:
            for first, count, batch in batches:
                program, packed = self._program(count)
                with self._phase("compile"):
                    program.prepare(state, batch, hyper, columns)
                state, metrics = program(state, batch, hyper, columns)
                rows = np.asarray(metrics)
                step_s, stall_s = (time.perf_counter() - began) / count, self.first.train_loader.stall_s
                for i, of_step in enumerate(rows.reshape(count, len(self.lanes), -1).tolist(), start=1):
                    self._take(first + i, packed.names, of_step, began + i * step_s, stall_s)
                step = first + count
                evaluated = cadence.evaluation_due(step)
                if evaluated:
                    self._evaluate(step, state)
                    scales = [member.record.lr_scale() for member in self.lanes]
                    hyper = hyper | {"lr_scale": jnp.asarray(scales, jnp.float32)}
                for k, member in enumerate(self.lanes):
                    stops = evaluated and (member.record.best.stop or member.pruned)
                    if not member.ended and (step == total or stops):
                        member.end(step, self._part(k, state), evaluated)
                if step in ends and 2 * sum(not member.ended for member in self.lanes) <= len(self.lanes):
                    break
                began = time.perf_counter()
        return state, step

    def _batches(self, calls: list[tuple[int, int]]) -> Generator[tuple[int, int, dict], None, None]:
        """Yield (first step, count, batch) of every call. If the members' orders differ, the batch's leaves have a
        member axis before the micro-batch axis."""
        loaders = [member.program.train_loader for member in self.lanes]
        if self.same_order:
            yield from loaders[0].batches(calls)
            return
        placed = all(loader.on_device and isinstance(loader.stream, IndexStream) for loader in loaders)
        if placed and self.first.config.train.accumulate_steps == 1:
            yield from self._positions(calls, loaders)
            return
        for together in zip(*(loader.batches(calls) for loader in loaders), strict=True):
            first, count, _ = together[0]
            axis = 0 if count == 1 else 1
            yield first, count, jax.tree.map(lambda *x: jnp.stack(x, axis), *(batch for _, _, batch in together))

    def _positions(self, calls: list[tuple[int, int]], loaders: Sequence[Loader]) -> Iterator[tuple[int, int, dict]]:
        """Do as `_batches` for data that are on the device, where a batch is its samples' positions: without a thread
        for each member."""
        for first, count in calls:
            found = [[loader.stream.batch(first + i) for i in range(count)] for loader in loaders]
            index = np.array([[rows for rows, _ in of_member] for of_member in found], np.int32)  # [member, step, row]
            sizes = [int(valid.sum()) for _, valid in found[0]]
            whole = [i for i, size in enumerate(sizes) if size == loaders[0].stream.batch_size]
            parts = [list(run) for _, run in itertools.groupby(range(count), key=lambda i: i in whole and len(whole))]
            for steps in parts:
                size = sizes[steps[0]]
                rows = index[:, steps, None, :size].swapaxes(0, 1)  # [step, member, micro-batch, row]
                rows = rows[0] if len(steps) == 1 else rows
                columns = loaders[0].source.columns
                yield first + steps[0], len(steps), row_keys.rows(rows, np.ones(rows.shape, bool), columns)

    def _program(self, count: int) -> tuple[Compiled, StackedMetrics]:
        def make() -> tuple[Compiled, StackedMetrics]:
            packed = StackedMetrics(self.first.step())
            mapped = jax.vmap(packed, in_axes=(0, None if self.same_order else 0, 0, None))
            on_cpu = self.first.layout.mesh.devices.flat[0].platform == "cpu"
            jitted = self.first.jit(repeat(mapped, count, as_loop=on_cpu), donate_argnums=0)
            return Compiled(jitted, "the population's step", batch=1, shapes=self.first.train_shapes), packed

        return self.first.cached(("population", len(self.lanes), self.same_order, count), make)

    def _take(self, step: int, names: Sequence[str], rows: list[list[float]], ended: float, stall_s: float) -> None:
        """Record a step's metrics, [member][name], with every member."""
        for member, row in zip(self.lanes, rows, strict=True):
            if member.ended:
                continue
            try:
                member.record.on_step_end(step, dict(zip(names, row, strict=True)), ended, stall_s)
            except NotFiniteError as error:
                member.error, member.ended = error, True

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Inside the context, no member's clock counts the time as training."""
        with contextlib.ExitStack() as stack:
            for member in self.lanes:
                stack.enter_context(member.record.clock.phase(name))
            yield

    def _evaluate(self, step: int, state: Any) -> None:
        with self._phase("evaluation"):
            found = self._metrics(state)
        training = {k: metrics for k, metrics in enumerate(found) if not self.lanes[k].ended}
        for k, metrics in training.items():
            self.lanes[k].evaluated(step, metrics, lambda k=k: self._part(k, state))
        if step == self.first.total_steps:
            return
        places = {self.members.index(self.lanes[k]): metrics for k, metrics in training.items()}
        for place in self.prune(step, places):
            self.members[place].pruned = True

    def _metrics(self, state: Any) -> list[dict[str, float]]:
        """Return every lane's metrics on its whole validation split."""
        programs = [member.program for member in self.lanes]
        sources = [program.data.source("validation") for program in programs]
        shared = all(source is sources[0] for source in sources)
        apart = shared or (
            all(_rows_of(p) is not None for p in programs) and len({len(source) for source in sources}) == 1
        )
        if not apart:  # a task may draw its validation data from the seed
            for k, program in enumerate(programs):
                program.state = self._part(k, state)
            return [program.evaluate() for program in programs]
        first, size = self.first, len(programs)
        source, stream, loader = programs[0].data.evaluation("validation")
        step = jax.vmap(first.evaluation_step(), in_axes=(0, 0, 0, None if shared else 0, None, 0))
        shapes = first.data.shapes(source, stream, loader)
        compiled = first.cached(
            ("evaluate together", size, shared),
            lambda: Compiled(first.jit(step), "the population's evaluation", batch=3, shapes=shapes),
        )
        params = (state.ema if first.config.evaluation.averaged else {}) or state.params
        numbers = _stack([program.traced_hparams() for program in programs])
        columns = self._columns("validation", loader)
        calls = [(index, 1) for index in range(stream.steps_per_epoch or UNKNOWN_STEPS)]
        if shared:
            batches = (batch for _, _, batch in loader.batches(calls))
        else:
            loaders = [program.data.evaluation("validation")[2] for program in programs]
            batches = (batch for _, _, batch in self._positions(calls, loaders))
        results = [
            jax.device_get(compiled(params, state.frozen, state.buffers, batch, columns, numbers)) for batch in batches
        ]
        own = lambda tree, k: {name: value[k] for name, value in tree.items()}
        return [
            evaluation.compute(
                program.task,
                program.config,
                *evaluation.collect(Statistics(own(r.sums, k), own(r.rows, k)) for r in results),
            )
            for k, program in enumerate(programs)
        ]

    def _columns(self, split: str, loader: Loader) -> dict[str, jax.Array]:
        """Return a split's columns on the device, checked and placed once."""
        if split not in self._placed:
            self._placed[split] = self.first.columns(loader)
        return self._placed[split]

    def _part(self, k: int, state: Any) -> Any:
        """Return the k-th member's state, by one compiled call for all of its arrays."""
        take = self.first.cached(("part",), lambda: jax.jit(lambda state, k: jax.tree.map(lambda leaf: leaf[k], state)))
        return take(state, k)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _rows_of(program: Program) -> bytes | None:
    """Return which rows of the dataset a program trains on; None for all."""
    rows = getattr(program.data.source("train"), "picked", None)
    return None if rows is None else rows.tobytes()
