"""Read the operations of a jax.profiler trace, with their own time; write the trace with module names for Perfetto."""

import collections
import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable, Collection, Iterable

import jax

from jaxtrain.train.tracking.throughput import PHASE

_GRAPH = "command_buffer"  # XLA's name for a CUDA graph; a trace has it for everything that runs in one


@dataclasses.dataclass(frozen=True)
class Operation:
    """One execution of one HLO instruction. program: its HLO module's name. device: its plane and ordinal. own_ns: time
    without the operations inside it. in_graph: it ran in a CUDA graph, and `name` is its kernel's."""

    name: str
    program: str
    device: str
    start_ns: float
    end_ns: float
    own_ns: float
    in_graph: bool = False


def read(folder: pathlib.Path, steps: Collection[str]) -> tuple[list[Operation], float]:
    """Return all devices' operations in the newest trace under a folder, and the nanoseconds in which the run
    evaluated, saved or compiled (`Throughput.phase`). Operations during that time are left out, except those of the
    training steps' programs, `steps`."""
    profile = jax.profiler.ProfileData.from_file(str(_newest(folder, "*.xplane.pb")))
    found: list[Operation] = []
    away: list[tuple[float, float]] = []
    for plane in profile.planes:
        for line in plane.lines:
            events = []
            for event in line.events:
                if event.name.startswith(PHASE):
                    away.append((event.start_ns, event.start_ns + event.duration_ns))
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    device = f"{plane.name} {stats.get('device_ordinal', 0)}"
                    graph = str(stats["hlo_op"]).startswith(_GRAPH)
                    name = event.name if graph else str(stats["hlo_op"])
                    program = str(stats.get("hlo_module", ""))
                    events.append((event.start_ns, event.start_ns + event.duration_ns, name, program, device, graph))
            found += _nested(events)
    beside = lambda one: any(start <= one.start_ns < end for start, end in away)
    kept = [operation for operation in found if operation.program in steps or not beside(operation)]
    return kept, sum(end - start for start, end in away)


def _nested(events: Iterable[tuple[float, float, str, str, str, bool]]) -> list[Operation]:
    """Return the operations of one line, from (start, end, name, program, device, in_graph). The time of nested
    operations is subtracted from the outer one's."""
    ordered = sorted(events, key=lambda event: (event[0], -event[1]))
    own = [end - start for start, end, *_ in ordered]
    open_now: list[int] = []
    for index, (start, end, *_) in enumerate(ordered):
        while open_now and ordered[open_now[-1]][1] <= start:
            open_now.pop()
        if open_now:
            own[open_now[-1]] -= min(end, ordered[open_now[-1]][1]) - start
        open_now.append(index)
    return [
        Operation(name, program, device, start, end, max(left, 0.0), graph)
        for (start, end, name, program, device, graph), left in zip(ordered, own, strict=True)
    ]


def busy_ns(operations: Iterable[Operation]) -> float:
    """Return the time in which a device ran any of these operations, averaged over the devices."""
    spans = collections.defaultdict(list)
    for operation in operations:
        spans[operation.device].append((operation.start_ns, operation.end_ns))
    totals = []
    for device in spans.values():
        total, reached = 0.0, float("-inf")
        for start, end in sorted(device):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        totals.append(total)
    return sum(totals) / len(totals) if totals else 0.0


def name_events(folder: pathlib.Path, target: pathlib.Path, label: Callable[[str, str], str]) -> None:
    """Write the newest trace under a folder for Perfetto, with operations named by label(operation, program)."""
    with gzip.open(_newest(folder, "*.trace.json.gz"), "rt", encoding="utf-8") as file:
        content = json.load(file)
    for event in content.get("traceEvents", ()):
        arguments = event.get("args") or {}
        if "hlo_op" in arguments:
            name = event["name"] if arguments["hlo_op"].startswith(_GRAPH) else arguments["hlo_op"]
            event["name"] = label(name, arguments.get("hlo_module", ""))
    with gzip.open(target, "wt", encoding="utf-8") as file:
        json.dump(content, file)


def _newest(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    return max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)
