"""Train many runs at once: their states are stacked, and the compiled step is vmapped over them."""

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config_io
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


@dataclasses.dataclass
class Outcome:
    """Result of a member. history: as from Trainer.train. error: what ended it, if it did not finish."""

    program: Program
    history: dict[str, Any]
    error: Exception | None = None


class Member:
    """One run of a population: its program, run folder and record.

    best: state, step and meta (JSON) of its best evaluation so far. ended: nothing more is written, although the common
    program still trains it.
    """

    def __init__(self, program: Program):
        self.program = program
        self.folder = program.config.run.folder
        self.tracker = Tracker(self.folder, program.config, True, lines=False)
        self.checkpoints: Checkpoints = run_dir.checkpoints(self.folder, program.config)
        self.record = RunRecord(program, self.tracker, self.checkpoints, Callbacks())
        self.best: tuple[Any, int, str] | None = None
        self.error: Exception | None = None
        self.ended = False

    def begin(self, system: SystemMetrics) -> None:
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)  # left by a population that was killed
        self.tracker.rewind(0)
        config_io.save(self.program.config, self.folder / "config.yaml")
        self.record.start_clock(0, system)

    def evaluated(self, step: int, metrics: dict[str, float], state: Callable[[], Any]) -> None:
        """Record an evaluation; if it is the best so far, keep the member's state, which `state()` returns."""
        if self.record.on_evaluation_end(step, metrics):
            self.record.step = step
            meta = json.dumps(self.record.meta(evaluated=True))  # as text, because the record keeps changing
            self.best = (state(), step, meta)

    def end(self, step: int, state: Any, evaluated: bool) -> None:
        """Write the last checkpoint, the best one and the summary."""
        self.program.state, record = state, self.record
        if self.best is not None and self.best[1] != step:
            best, at, meta = self.best
            self.checkpoints.save(best, at, json.loads(meta))
        record.step = step
        self.checkpoints.save(state, step, record.meta(evaluated))
        self.checkpoints.wait()
        record.samples_per_s = record.clock.samples_per_s(step)
        summary = record.summary(time.perf_counter() - record.clock.began)
        run_dir.write_summary(self.folder, summary, self.program.layout.mesh.size)
        self.tracker.close()
        self.ended, self.best = True, None


class Population:
    """Variants of one program (`Program.variant`), trained together on one device, each in its own run folder.

    Every member has its own rates, numbers, seed, order of samples, plateau and early stop; its final weights equal
    those of a separate run, up to the order of sums. Unlike a separate run, it has no resume, histograms, pictures and
    train.log. Raises UserError for several devices, `optim.lr: auto`, and groups that train in some epochs only.
    """

    def __init__(self, programs: Sequence[Program]):
        first = self.first = programs[0]
        if first.layout.mesh.size > 1:
            raise UserError(f"a population trains on one device, not on {first.layout.mesh.size}: set shard.devices=1")
        if first.config.optim.auto_lr:
            raise UserError("optim.lr: auto is not offered for trials in one program; give a number, or search it")
        if groups.boundaries(first.config.optim):
            raise UserError("optim.groups: trials in one program offer no groups that train in some epochs only")
        self.same_order = len({program.config.seed for program in programs}) == 1
        self.members = [Member(program) for program in programs]

    @host_memory.kept()
    def train(self) -> list[Outcome]:
        """Train all members to the end of their configs; return their results."""
        system = SystemMetrics()
        for member in self.members:
            member.begin(system)
        cadence, total = self.members[0].record.cadence, self.first.total_steps
        programs = [member.program for member in self.members]
        state = _stack([program.state for program in programs])
        hyper = _stack([program.hyper() for program in programs])
        columns = self.first.columns(self.first.train_loader)
        calls = list(cadence.calls(0))
        began = time.perf_counter()
        for first, count, batch in self._batches(calls):
            program, packed = self._program(count)
            with self._phase("compile"):
                program.prepare(state, batch, hyper, columns)
            state, metrics = program(state, batch, hyper, columns)
            rows = np.asarray(metrics)
            step_s, stall_s = (time.perf_counter() - began) / count, self.first.train_loader.stall_s
            for i, of_step in enumerate(rows.reshape(count, len(self.members), -1).tolist(), start=1):
                self._take(first + i, packed.names, of_step, began + i * step_s, stall_s)
            step = first + count
            evaluated = cadence.evaluation_due(step)
            if evaluated:
                self._evaluate(step, state)
                scales = [member.record.lr_scale() for member in self.members]
                hyper = hyper | {"lr_scale": jnp.asarray(scales, jnp.float32)}
            for k, member in enumerate(self.members):
                if not member.ended and (step == total or (evaluated and member.record.best.stop)):
                    member.end(step, self._part(k, state), evaluated)
            if all(member.ended for member in self.members):
                break
            began = time.perf_counter()
        return [Outcome(member.program, member.record.history(), member.error) for member in self.members]

    def _batches(self, calls: list[tuple[int, int]]) -> Iterator[tuple[int, int, dict]]:
        """Yield (first step, count, batch) of every call. If the members' orders differ, the batch's leaves have a
        member axis before the micro-batch axis."""
        if self.same_order:
            yield from self.first.train_loader.batches(calls)
            return
        loaders = [member.program.train_loader for member in self.members]
        for together in zip(*(loader.batches(calls) for loader in loaders), strict=True):
            first, count, _ = together[0]
            axis = 0 if count == 1 else 1
            yield first, count, jax.tree.map(lambda *x: jnp.stack(x, axis), *(batch for _, _, batch in together))

    def _program(self, count: int) -> tuple[Compiled, StackedMetrics]:
        def make() -> tuple[Compiled, StackedMetrics]:
            packed = StackedMetrics(self.first.step())
            mapped = jax.vmap(packed, in_axes=(0, None if self.same_order else 0, 0, None))
            on_cpu = self.first.layout.mesh.devices.flat[0].platform == "cpu"
            jitted = self.first.jit(repeat(mapped, count, as_loop=on_cpu), donate_argnums=0)
            return Compiled(jitted, "the population's step", batch=1, shapes=self.first.train_shapes), packed

        return self.first.cached(("population", len(self.members), self.same_order, count), make)

    def _take(self, step: int, names: Sequence[str], rows: list[list[float]], ended: float, stall_s: float) -> None:
        """Record a step's metrics, [member][name], with every member."""
        for member, row in zip(self.members, rows, strict=True):
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
            for member in self.members:
                stack.enter_context(member.record.clock.phase(name))
            yield

    def _evaluate(self, step: int, state: Any) -> None:
        with self._phase("evaluation"):
            found = self._metrics(state)
        for k, metrics in enumerate(found):
            if not self.members[k].ended:
                self.members[k].evaluated(step, metrics, lambda k=k: self._part(k, state))

    def _metrics(self, state: Any) -> list[dict[str, float]]:
        """Return every member's metrics on the whole validation split."""
        programs = [member.program for member in self.members]
        if not self.same_order:  # a task may draw its validation data from the seed
            for k, program in enumerate(programs):
                program.state = self._part(k, state)
            return [program.evaluate() for program in programs]
        first, size = self.first, len(programs)
        source, stream, loader = first.data.evaluation("validation")
        step = jax.vmap(first.evaluation_step(), in_axes=(0, 0, 0, None, None, 0))
        shapes = first.data.shapes(source, stream, loader)
        compiled = first.cached(
            ("evaluate together", size),
            lambda: Compiled(first.jit(step), "the population's evaluation", batch=3, shapes=shapes),
        )
        params = (state.ema if first.config.evaluation.averaged else {}) or state.params
        numbers = _stack([program.traced_hparams() for program in programs])
        columns = first.columns(loader)
        calls = ((index, 1) for index in range(stream.steps_per_epoch or UNKNOWN_STEPS))
        results = [
            jax.device_get(compiled(params, state.frozen, state.buffers, batch, columns, numbers))
            for _, _, batch in loader.batches(calls)
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

    def _part(self, k: int, state: Any) -> Any:
        """Return the k-th member's state, by one compiled call for all of its arrays."""
        take = self.first.cached(("part",), lambda: jax.jit(lambda state, k: jax.tree.map(lambda leaf: leaf[k], state)))
        return take(state, k)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
