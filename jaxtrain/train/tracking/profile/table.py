"""Tabulate where the time of a few steps went, by kind and by module, and suggest the setting that helps most."""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config import TrainingConfig
from jaxtrain.train.tracking.profile import names
from jaxtrain.train.tracking.profile.names import Origin
from jaxtrain.train.tracking.profile.trace import Operation, busy_ns

INPUT, HOST, OTHER = "input", "host", "other programs"
MOST_ROWS = 14  # most modules to list


@dataclasses.dataclass(frozen=True)
class Window:
    """The traced steps.

    seconds: wall-clock time, without evaluations and checkpoints. input_s: waiting for data. compiled: lines about
    programs compiled meanwhile. on_device: the dataset is on the devices. programs: program -> origins of its
    instructions.
    """

    first: int
    last: int
    seconds: float
    input_s: float
    device: str
    compiled: Sequence[str]
    on_device: bool
    programs: Mapping[str, Mapping[str, Origin]]

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True)
class Table:
    """Milliseconds per step. kinds: sum to step_ms, with input and host. modules: path, with layer numbers as `*` ->
    (forward, backward). attention: the kernels it ran on, "" if none is known. lever: the advice."""

    window: Window
    step_ms: float
    kinds: dict[str, float]
    modules: dict[str, tuple[float, float]]
    attention: str
    lever: str

    @classmethod
    def of(cls, window: Window, operations: Sequence[Operation], config: TrainingConfig, platform: str) -> "Table":
        """Sum up the operations of a trace. If a device runs several at once, each counts by its share of the time."""
        per_step = 1e-6 / window.steps
        own = [(operation, _origin(window, operation)) for operation in operations]
        own = [(operation, origin) for operation, origin in own if origin is None or not origin.container]
        busy = busy_ns([operation for operation, _ in own])
        scale = per_step * busy / max(sum(operation.own_ns for operation, _ in own), 1.0)
        kinds: dict[str, float] = dict.fromkeys(names.KINDS, 0.0)
        modules: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for operation, origin in own:
            kind = OTHER if origin is None else origin.kind
            kinds[kind] = kinds.get(kind, 0.0) + operation.own_ns * scale
            place = OTHER if origin is None else re.sub(r"(?<![^.])\d+(?![^.])", "*", origin.module)
            modules[place][bool(origin and origin.backward)] += operation.own_ns * scale
        step_ms = max(window.seconds * 1e3 / window.steps, busy * per_step)
        input_ms = window.input_s * 1e3 / window.steps
        kinds[INPUT] = min(input_ms, step_ms)
        kinds[HOST] = max(0.0, step_ms - kinds[INPUT] - busy * per_step)
        places = {name: (forward, backward) for name, (forward, backward) in _gathered(modules).items()}
        attention = _attention([origin for _, origin in own if origin is not None])
        lever = _lever(window, step_ms, kinds, places, attention, config, platform)
        return cls(window, step_ms, kinds, places, attention, lever)

    def lines(self) -> list[str]:
        window, share = self.window, lambda ms: f"{100 * ms / max(self.step_ms, 1e-9):5.1f} %"
        found = [
            f"profile of steps {window.first} to {window.last}: {self.step_ms:.2f} ms a step on {window.device}",
            "",
        ]
        found += [f"{'kind':<44}{'ms/step':>10}{'share':>9}"]
        ordered = sorted(self.kinds.items(), key=lambda item: -item[1])
        found += [f"{kind:<44}{ms:>10.3f}{share(ms):>9}" for kind, ms in ordered if ms or kind in (INPUT, HOST)]
        found += ["", f"{'module':<44}{'forward':>10}{'backward':>10}{'share':>9}"]
        found += [
            f"{name[-43:]:<44}{forward:>10.3f}{backward:>10.3f}{share(forward + backward):>9}"
            for name, (forward, backward) in self.modules.items()
        ]
        found += [""] + ([f"attention: {self.attention}"] if self.attention else [])
        found += [f"compiled during these steps: {'; '.join(window.compiled) or 'nothing'}", self.lever]
        return found

    def content(self) -> dict[str, Any]:
        """Return the content of profile.json."""
        modules = {name: {"forward_ms": f, "backward_ms": b} for name, (f, b) in self.modules.items()}
        return {
            "first_step": self.window.first,
            "last_step": self.window.last,
            "device": self.window.device,
            "ms_per_step": self.step_ms,
            "kinds_ms": self.kinds,
            "modules": modules,
            "attention": self.attention,
            "compiled": list(self.window.compiled),
            "lever": self.lever,
        }


def _origin(window: Window, operation: Operation) -> Origin | None:
    """Return the origin of an operation's instruction or, in a CUDA graph, of its kernel; None for other programs."""
    program = window.programs.get(operation.program)
    if program is None:
        return None
    return program.get(operation.name) or (names.of_kernel(operation.name) if operation.in_graph else None)


def _gathered(modules: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the modules that take longest, and the sum of all others in one row."""
    ordered = sorted(modules.items(), key=lambda item: -sum(item[1]))
    kept = {name: list(times) for name, times in ordered[:MOST_ROWS]}
    rest = ordered[MOST_ROWS:]
    if rest:
        kept[f"({len(rest)} more)"] = [sum(times[i] for _, times in rest) for i in (0, 1)]
    return kept


def _attention(origins: Sequence[Origin]) -> str:
    found = {origin.fused_attention for origin in origins if origin.kind == names.ATTENTION}
    kinds = {True: "a fused kernel", False: "the formula (two products and a softmax)"}
    if True in found:  # other attention operations, such as casts, belong to the fused kernel
        return kinds[True]
    return kinds[False] if found else ""


def _lever(window, step_ms, kinds, modules, attention, config: TrainingConfig, platform: str) -> str:
    """Return a sentence with the setting that can save most time, judged by the shares of time."""
    share = {kind: ms / max(step_ms, 1e-9) for kind, ms in kinds.items()}
    percent = lambda kind: f"{100 * share[kind]:.0f} %"
    if window.compiled:
        return (
            f"largest lever: {len(window.compiled)} compilation(s) fell into these steps; fewer shapes "
            "(data.shapes=auto, padding to buckets) or a later profile.start show the steady state"
        )
    if share[INPUT] > 0.15 and not window.on_device:
        workers = f"data.num_workers={max(2, 2 * config.data.num_workers)}"
        return (
            f"largest lever: the step waits for data {percent(INPUT)} of its time: {workers}, or data.placement=device"
        )
    if share[HOST] + share[INPUT] > 0.25:
        more = f"train.steps_per_call={max(8, 4 * config.train.steps_per_call)}"
        idle = 100 * (share[HOST] + share[INPUT])
        return (
            f"largest lever: the device is idle {idle:.0f} % of the time while the host prepares a step: {more}, or a "
            "larger data.batch_size"
        )
    device = {kind: ms for kind, ms in kinds.items() if kind not in (INPUT, HOST)}
    most = max(device, key=lambda kind: device[kind])
    module = next((name for name in modules if not name.startswith("(")), "the model")
    if most == names.COLLECTIVE:
        advice = "a larger data.batch_size or train.accumulate_steps sends the gradients less often"
    elif most == names.ATTENTION and platform == "gpu" and "fused" not in attention:
        advice = "precision.policy=bf16 lets a fused kernel take it"
    elif most in (names.MATMUL, names.ELEMENTWISE) and platform == "gpu" and config.precision.policy == "fp32":
        advice = "precision.policy=bf16 halves what it reads and multiplies on tensor cores"
    elif most == names.ELEMENTWISE and config.train.remat == "full":
        advice = "train.remat=dots computes less again"
    elif most == OTHER:
        advice = "programs beside the step ran: evaluations, pictures or callbacks"
    else:
        advice = f"it is the model's own work, most of it in {module}: there a smaller or cheaper layer counts"
    return f"largest lever: {most} takes {percent(most)} of the step; {advice}"
