"""Count the collectives of a compiled program and their bytes, read from its optimised HLO."""

import dataclasses
import math
import re
from collections import defaultdict

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALL = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program. count: executions per call of the program. size: bytes of its full operand or result
    on one device. sent: bytes that one device sends in a ring, summed over all executions."""

    kind: str
    dtype: str
    group: int
    size: int
    count: int

    @property
    def sent(self) -> int:
        share = (self.group - 1) / self.group
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return round(self.size * factor * self.count)


def collectives(hlo: str) -> list[Collective]:
    """List the collectives of an optimised HLO module; those in loops are counted by trip count."""
    bodies, entry = _computations(hlo)
    times: dict[str, int] = defaultdict(int)
    _count(bodies, entry, 1, times)
    found = []
    for name, lines in bodies.items():
        if not times[name]:
            continue
        for line in lines:
            match = _COLLECTIVE.search(line)
            if match:
                found.append(_read(match, line, times[name]))
    return [collective for collective in found if collective.group > 1]


def summary(found: list[Collective]) -> dict[str, dict[str, int]]:
    """Return the count and the bytes sent per device, by kind of collective."""
    total: dict[str, dict[str, int]] = {}
    for collective in found:
        entry = total.setdefault(collective.kind, {"count": 0, "bytes": 0})
        entry["count"] += collective.count
        entry["bytes"] += collective.sent
    return total


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = header.group(1)
            bodies[current] = []
            if line.startswith("ENTRY"):
                entry = current
        elif line.startswith("}"):
            current = None
        elif current is not None:
            bodies[current].append(line)
    return bodies, entry


def _count(bodies: dict[str, list[str]], name: str, factor: int, times: dict[str, int]) -> None:
    times[name] += factor
    for line in bodies.get(name, ()):
        trips = _TRIPS.search(line)
        inner = factor * (int(trips.group(1)) if trips and " while(" in line else 1)
        for single, several in _CALL.findall(line):
            for callee in [single] if single else re.findall(r"[\w.\-]+", several):
                if callee in bodies:
                    _count(bodies, callee, inner, times)


def _read(match: re.Match, line: str, count: int) -> Collective:
    result, kind, start = match.groups()
    shapes = [(dtype, _bytes(dtype, dims)) for dtype, dims in _SHAPE.findall(result) if dtype in BYTES]
    pairs = kind != "all-reduce" or result.startswith("((")  # an all-reduce lists its operands from jax 0.11 on
    if start and pairs and len(shapes) > 1:  # (operands, results): the results are the latter half
        shapes = shapes[len(shapes) // 2 :]
    group = _group(line)
    size = sum(size for _, size in shapes)
    if kind == "reduce-scatter":
        size *= group  # the operand is `group` times the result
    return Collective(kind, shapes[0][0] if shapes else "?", group, size, count)


def _bytes(dtype: str, dims: str) -> int:
    size = BYTES[dtype]
    for n in filter(None, dims.split(",")):
        size *= int(n)
    return size


def _group(line: str) -> int:
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota.group(2))
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh.group(2)))
    explicit = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if explicit:
        return len(explicit.group(1).split(","))
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    return 2 if pairs else 1
