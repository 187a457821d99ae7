"""Trace a few steps of a run and report where their time went."""

import json
import pathlib
import time
from typing import Any

import jax

from jaxtrain.config import TrainingConfig
from jaxtrain.train import run_dir
from jaxtrain.train.tracking.profile import names, trace
from jaxtrain.train.tracking.profile.table import Table, Window
from jaxtrain.train.tracking.tracker import Tracker

FOLDER = "profile"  # in the run folder: the trace, table.txt, profile.json, perfetto.json.gz


class Profile:
    """Profiler for the setting `profile: {start, steps}`, counted from where the run starts or resumes; process 0
    traces. The loop calls `begin` before a step's batch is fetched, `ran` after every call, and `close` at the end."""

    def __init__(self, config: TrainingConfig, tracker: Tracker, step: int, total: int, on_device: bool):
        left = max(0, total - step)  # a run may already be past its end
        wanted = config.profile
        self.steps = min(wanted.steps, left) if jax.process_index() == 0 else 0
        self.first = step + max(0, min(wanted.start, left - self.steps))
        self.config, self.tracker, self.on_device = config, tracker, on_device
        self.folder = config.run.folder / FOLDER
        self.table: Table | None = None
        self._began: tuple[int, float, float] | None = None  # step, clock, seconds waited for data
        self._programs: dict[int, Any] = {}
        self._compiled: list[str] = []

    def begin(self, step: int, stall_s: float, state: Any) -> None:
        """Start the trace if it is due. step: steps done. stall_s: seconds waited for data so far."""
        if not self.steps or self._began is not None or step < self.first:
            return
        jax.block_until_ready(state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing every Python call would slow the steps down
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._began = (step, time.perf_counter(), stall_s)

    def ran(self, step: int, program: Any, compiled: str, metrics: Any, stall_s: float) -> None:
        """Note a call of the compiled step; after the last traced one, write the report. step: steps done after it.
        compiled: what was compiled for it, or ""."""
        if not self.steps or self._began is None:
            return
        self._programs[id(program)] = program
        self._compiled += [compiled] if compiled else []
        first, began, stalled = self._began
        if step - first < self.steps:
            return
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - began
        jax.profiler.stop_trace()
        self.steps = 0
        self._report(first + 1, step, seconds, stall_s - stalled)

    def close(self) -> None:
        """Stop a trace that is still running because the run has ended or failed."""
        if self.steps and self._began is not None:
            self.steps = 0
            jax.profiler.stop_trace()
            self.tracker.warn(f"profile: the run ended within the traced steps; the trace alone is in {self.folder}")

    def _report(self, first: int, last: int, seconds: float, input_s: float) -> None:
        programs: dict[str, dict[str, names.Origin]] = {}
        for program in self._programs.values():
            name, found = names.origins(program.as_text())
            programs[name] = found | programs.get(name, {})
        kind = jax.devices()[0]
        device = f"{jax.device_count()} x {kind.device_kind}"
        operations, away_ns = trace.read(self.folder, programs)
        window = Window(
            first, last, seconds - away_ns * 1e-9, max(input_s, 0.0), device, self._compiled, self.on_device, programs
        )
        self.table = Table.of(window, operations, self.config, kind.platform)
        self._write(self.table, programs)
        for line in self.table.lines():
            self.tracker.info(line)
        shown = pathlib.Path(self.folder)
        self.tracker.info(
            f"traces: {shown / 'perfetto.json.gz'} for ui.perfetto.dev, `tensorboard --logdir {shown}` for its profiler"
        )

    def _write(self, table: Table, programs: dict[str, dict[str, names.Origin]]) -> None:
        def label(operation: str, program: str) -> str:
            origin = programs.get(program, {}).get(operation)
            return operation if origin is None else f"{origin.module}: {operation}"

        run_dir.write(self.folder, "table.txt", "\n".join(table.lines()) + "\n")
        run_dir.write(self.folder, "profile.json", json.dumps(table.content(), indent=1))
        trace.name_events(self.folder, self.folder / "perfetto.json.gz", label)
