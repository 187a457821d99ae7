"""Many runs of one code trained as one: their states are stacked and the compiled step is mapped over them."""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.runtime import host_memory
from jaxtrain.runtime.watchdog import Watchdog
from jaxtrain.task import Statistics
from jaxtrain.train import evaluation, run_dir
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.loop.loop import Call, Loop, NotFiniteError
from jaxtrain.train.step.train_step import StackedMetrics, repeat
from jaxtrain.train.tracking.system_metrics import SystemMetrics
from jaxtrain.train.tracking.throughput import Throughput
from jaxtrain.train.tracking.tracker import Tracker
from jaxtrain.train.trainer import Trainer


@dataclasses.dataclass
class Outcome:
    """What became of a member. history: as Trainer.train gives it. error: what ended it, where it did not finish."""

    trainer: Trainer
    history: dict[str, Any]
    error: Exception | None = None


class Population:
    """Trains variants of one trainer (`Trainer.variant`) in one program on one device, each in its own run folder.

    Every member has its own rates, numbers, seed, order of samples, plateau and early stop; its final weights are those
    of its run alone, up to the order of sums. What a run alone does and this does not: resume, histograms, pictures,
    train.log. Raises UserError for members on several devices.
    """

    def __init__(self, members: Sequence[Trainer]):
        first = members[0]
        if first.layout.mesh.size > 1:
            raise UserError(f"a population trains on one device, not on {first.layout.mesh.size}: set shard.devices=1")
        self.members, self.first = list(members), first
        self.same_order = len({member.config.seed for member in members}) == 1
        self.loops = [
            Loop(m, Tracker(m.folder, m.config, True, lines=False), m.checkpoints(), Watchdog(m.folder, None))
            for m in members
        ]
        self.errors: list[Exception | None] = [None] * len(members)
        self.ended = [False] * len(members)
        self.best: list[tuple[Any, int, str] | None] = [None] * len(members)  # state, step and meta of the best so far

    @host_memory.kept()
    def train(self) -> list[Outcome]:
        """All members to the end of their configs."""
        self._begin()
        lead, total = self.loops[0], self.first.total_steps
        state = _stack([member.state for member in self.members])
        hyper = _stack([member.hyper() for member in self.members])
        columns = self.first.columns(self.first.train_loader)
        calls = list(lead.calls(0, total))
        began = time.perf_counter()
        for first, count, batch in self._batches(calls):
            program, packed = self._program(count)
            state, metrics = program(state, batch, hyper, columns)
            ended = time.perf_counter()
            self._take(Call(first, count, None, packed.names, began, ended, self.first.train_loader.stall_s), metrics)
            step = first + count
            evaluated = lead.due(step, lead.evaluate_every, total) and lead.has_validation
            if evaluated:
                self._evaluate(step, state, last=step == total)
                hyper = hyper | {"lr_scale": jnp.asarray([loop.lr_scale() for loop in self.loops], jnp.float32)}
            elif step == total:
                self._end(range(len(self.members)), step, state, evaluated=False)
            if all(self.ended):
                break
            began = time.perf_counter()
        return [
            Outcome(member, loop.history(), error)
            for member, loop, error in zip(self.members, self.loops, self.errors, strict=True)
        ]

    def _begin(self) -> None:
        system = SystemMetrics()
        for member, loop in zip(self.members, self.loops, strict=True):
            shutil.rmtree(member.folder / "checkpoints", ignore_errors=True)  # of a population that was killed
            loop.tracker.rewind(0)
            config_io.save(member.config, member.folder / "config.yaml")
            loop.clock, loop.system = Throughput(0, member.work()), system

    def _batches(self, calls: list[tuple[int, int]]) -> Iterator[tuple[int, int, dict]]:
        """(first step, count, batch) of every call; the batch's leaves have a member axis before the micro-batch's,
        where the members' orders differ."""
        if self.same_order:
            yield from self.first.train_loader.batches(calls)
            return
        for together in zip(*(member.train_loader.batches(calls) for member in self.members), strict=True):
            first, count, _ = together[0]
            axis = 0 if count == 1 else 1
            yield first, count, jax.tree.map(lambda *x: jnp.stack(x, axis), *(batch for _, _, batch in together))

    def _program(self, count: int) -> tuple[Compiled, StackedMetrics]:
        def make() -> tuple[Compiled, StackedMetrics]:
            packed = StackedMetrics(self.first.step())
            mapped = jax.vmap(packed, in_axes=(0, None if self.same_order else 0, 0, None))
            on_cpu = self.first.layout.mesh.devices.flat[0].platform == "cpu"
            jitted = self.first.jit(repeat(mapped, count, as_loop=on_cpu), donate_argnums=0)
            return Compiled(jitted, "the population's step", batch=1), packed

        return self.first.cached(("population", len(self.members), self.same_order, count), make)

    def _take(self, call: Call, metrics: jax.Array) -> None:
        """metrics: [member, name], or [step, member, name] of several steps."""
        rows = np.asarray(metrics).reshape(call.count, len(self.members), -1)
        for k, loop in enumerate(self.loops):
            for i in range(call.count):
                if self.ended[k]:
                    break
                try:
                    loop.on_step_end(call.first + i + 1, dict(zip(call.names, rows[i, k].tolist(), strict=True)), call)
                except NotFiniteError as error:
                    self.errors[k], self.ended[k] = error, True

    def _evaluate(self, step: int, state: Any, last: bool) -> None:
        done = []
        for k, metrics in enumerate(self._metrics(state)):
            loop = self.loops[k]
            if self.ended[k]:
                continue
            if loop.on_evaluation_end(step, metrics):
                loop.step = step
                meta = json.dumps(loop.meta(evaluated=True))  # as of now: the loop goes on writing into it
                self.best[k] = (self._part(k, state), step, meta)
            if last or loop.best.stop:
                done.append(k)
        self._end(done, step, state, evaluated=True)

    def _metrics(self, state: Any) -> list[dict[str, float]]:
        """Of every member on the whole validation split."""
        if not self.same_order:  # a task may draw its validation data from the seed
            for k, member in enumerate(self.members):
                member.state = self._part(k, state)
            return [member.evaluate() for member in self.members]
        first, size = self.first, len(self.members)
        _, stream, loader = first.data.evaluation("validation")
        step = jax.vmap(first.evaluation_step(), in_axes=(0, 0, 0, None, None, 0))
        program = first.cached(
            ("evaluate together", size), lambda: Compiled(first.jit(step), "the population's evaluation", batch=3)
        )
        params = (state.ema if first.config.evaluation.averaged else {}) or state.params
        numbers = _stack([member.traced_hparams() for member in self.members])
        columns = first.columns(loader)
        calls = ((index, 1) for index in range(stream.steps_per_epoch))
        results = [
            jax.device_get(program(params, state.frozen, state.buffers, batch, columns, numbers))
            for _, _, batch in loader.batches(calls)
        ]
        own = lambda tree, k: {name: value[k] for name, value in tree.items()}
        return [
            evaluation.compute(
                member.task,
                member.config,
                *evaluation.collect(Statistics(own(r.sums, k), own(r.rows, k)) for r in results),
            )
            for k, member in enumerate(self.members)
        ]

    def _end(self, which: Iterable[int], step: int, state: Any, evaluated: bool) -> None:
        """Members that are done: their last checkpoint and their summary."""
        for k in which:
            if self.ended[k]:
                continue
            member, loop = self.members[k], self.loops[k]
            member.state = self._part(k, state)
            if self.best[k] is not None and self.best[k][1] != step:
                best, at, meta = self.best[k]
                loop.checkpoints.save(best, at, json.loads(meta))
            loop.save(step, evaluated)
            loop.checkpoints.wait()
            loop.samples_per_s = loop.clock.samples_per_s(step)
            summary = member.summary(loop, time.perf_counter() - loop.clock.began)
            run_dir.write_summary(member.folder, summary, member.layout.mesh.size)
            loop.tracker.close()
            self.ended[k], self.best[k] = True, None

    def _part(self, k: int, state: Any) -> Any:
        """The k-th member's state, in one call for all of its arrays."""
        take = self.first.cached(("part",), lambda: jax.jit(lambda state, k: jax.tree.map(lambda leaf: leaf[k], state)))
        return take(state, k)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
