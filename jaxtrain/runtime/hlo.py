"""Parse the text of an optimised XLA program: instructions, shapes, and the Python lines that they come from."""

import dataclasses
import functools
import math
import re

from jaxtrain.runtime.collectives import BYTES

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_HEAD = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_LIBRARIES = re.compile(r"/(?:jax|jaxlib|flax|optax|numpy)/|<")  # frames of these are skipped
_OWN = re.compile(r".*/(?=(?:jaxtrain|torch_bridge)/)|.*/site-packages/")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An HLO instruction. shapes: (dtype, dims) of each result. text: the rest of the line after the operands."""

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the results."""
        return sum(BYTES[dtype] * math.prod(dims) for dtype, dims in self.shapes)

    @property
    def elements(self) -> int:
        return math.prod(self.shapes[0][1]) if self.shapes else 0

    def attribute(self, name: str) -> str:
        """Return the value of an attribute without quotes, "" if there is none."""
        found = re.search(rf"\b{name}=([^,\s{{}}]+)", self.text)
        return found.group(1).strip('"%') if found else ""

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found.group(1) if found else ""


Computation = dict[str, Instruction]


class Program:
    """A parsed program. computations: name -> instructions by name. entry: name of the entry computation."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        table, current = None, None
        for line in text.splitlines():
            if line in _TABLES:
                table = self._tables[line]
            elif table is not None:
                if line.strip():
                    number, rest = line.split(" ", 1)
                    table[int(number)] = rest
                else:
                    table = None
            elif line.startswith("}"):
                current = None
            elif line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
                first, name = re.match(r"(ENTRY )?%?([\w.\-]+)", line).groups()
                current = self.computations[name] = {}
                self.entry = name if first else self.entry
            elif current is not None and _HEAD.match(line):
                instruction = _read(line)
                current[instruction.name] = instruction

    def called(self, instruction: Instruction, attribute: str = "calls") -> Computation:
        return self.computations.get(instruction.attribute(attribute), {})

    def source(self, instruction: Instruction) -> str:
        """Return the innermost line outside JAX that an instruction comes from, and that line's caller, as
        "nn/linear.py:35 linear < ..."; the end of op_name if unknown."""
        candidates = [instruction, *self.called(instruction).values()]
        for each in candidates:
            frames = self._frames(each)
            if frames:
                return " < ".join(frames[:2])
        return instruction.op_name[-60:]

    def _frames(self, instruction: Instruction) -> list[str]:
        frame, found = int(instruction.attribute("stack_frame_id") or 0), []
        while frame:
            entry = _numbers(self._tables["StackFrames"].get(frame, ""))
            place = _numbers(self._tables["FileLocations"].get(entry.get("file_location_id", 0), ""))
            name = self._tables["FileNames"].get(place.get("file_name_id", 0), "").strip('"')
            if name and not _LIBRARIES.search(name):
                function = self._tables["FunctionNames"].get(place.get("function_name_id", 0), "").strip('"')
                found.append(f"{_OWN.sub('', name)}:{place.get('line', 0)} {function}".rstrip())
            parent = entry.get("parent_frame_id", 0)
            frame = parent if parent != frame else 0
        return found


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}


def _read(line: str) -> Instruction:
    root, name = _HEAD.match(line).groups()
    start = _HEAD.match(line).end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    shapes = tuple(
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _SHAPE.findall(line[start:end])
        if dtype in BYTES
    )
    rest = line[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode = rest[:opening]
    inside = "" if opcode in ("constant", "parameter") else rest[opening + 1 : closing - 1]
    return Instruction(name, opcode, shapes, tuple(re.findall(r"%([\w.\-]+)", inside)), rest[closing:], bool(root))


def _closing(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += text[place] in "({["
        depth -= text[place] in ")}]"
        if depth == 0:
            return place + 1
    return len(text)
