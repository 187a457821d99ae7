"""Errors for torch code that cannot be converted to JAX, and the source lines that they show."""

import dataclasses
import inspect
import linecache
import os
import re
import traceback
import types
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """A reason why a module cannot be converted to JAX.

    what: the operator or the reason. where: "file:line  source". module: path of the submodule, "" for the root.
    """

    what: str
    where: str = ""
    module: str = ""

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f"\n      at {self.where}"
        return text + (f"\n      in {self.module}" if self.module else "")


class UnsupportedModel(ValueError):
    """Error for a torch module that cannot be converted to JAX as it is.

    obstacles: every reason found. fails_in_torch: torch cannot call the module with these inputs either.
    """

    def __init__(self, name: str, obstacles: Sequence[Obstacle], advice: str):
        self.obstacles = tuple(obstacles)
        self.fails_in_torch = advice == ADVICE_FAULT
        if self.fails_in_torch:
            super().__init__(f"{name} fails in torch with these inputs: {obstacles[0]}\n{advice}")
            return
        count = f"{len(obstacles)} reason" + "s" * (len(obstacles) != 1)
        lines = "\n".join(f"  {number}. {obstacle}" for number, obstacle in enumerate(obstacles, 1))
        super().__init__(f"{name} cannot be converted to JAX, for {count}:\n{lines}\n{advice}".rstrip())


class NoLoss(UserError):
    """Error for a loss function that returns something other than a loss. Torch could not train with it either."""


class CannotRecord(UserError):
    """Error for a loss that cannot become one compiled program. Torch can still run it."""


class RunsOnceInTorch(CannotRecord):
    """Error for a call that torch runs although it could be recorded: what is recorded stays as it is."""


class StaysInTorch(CannotRecord):
    """Error for code that torch has to run whole: compiled parts inside it would compute something else."""


def stays_in_torch(error: BaseException | None) -> bool:
    """Return True if the error or one of its causes is StaysInTorch: torch then runs the code with all its parts."""
    while error is not None and not isinstance(error, StaysInTorch):
        error = error.__cause__
    return error is not None


class Unfollowed(CannotRecord):
    """Error for code whose effects TorchDynamo does not repeat as Python has them, or only with a graph per call."""


class NotCaptured(UserError):
    """Error for a call that TorchDynamo does not capture as one graph. Nothing of the call has run.

    what: the reason. where: "file:line  source", or "". lasting: later calls would be refused too.
    """

    def __init__(self, what: str, where: str = "", lasting: bool = False):
        self.what, self.where, self.lasting = what, where, lasting
        super().__init__(f"{what} at {where}" if where else what)


class MayRaise(StaysInTorch):
    """Error for a non-finite step where torch may raise, and the code may handle that: torch runs the step instead."""

    def __init__(self, what: str):
        super().__init__(f"the loss, a gradient or a result is not finite, where {what} may raise")


class WritesOutside(NotImplementedError):
    """Error for code that writes to a file or a log at every call: it may run only in calls that count."""


class NoForm(CannotRecord):
    """Error for an operator whose lowering refuses these values or their derivative, with its reason."""

    def __init__(self, reason: object, stack_trace: str | None):
        where = source_line(stack_trace)
        super().__init__(f"{reason}, at {where}" if where else str(reason))


class WideIntegers(CannotRecord):
    """Error for integer arguments of a call that do not fit into JAX's 32 bits."""


def unreadable(name: str, value: Any, error: Exception) -> CannotRecord:
    """Return the error for an object that raises when it is looked at. name: of its place in the code. value: the
    object, or None for one of several."""
    text = " ".join(str(error).split())[:200]
    kind = "an object" if value is None else f"an object of class {type(value).__name__}"
    place, told = f" ({name})" if name else "", f": {text}" if text else ""
    return CannotRecord(f"the code reads {kind}{place} that raises {type(error).__name__} when it is looked at{told}")


class OperatorFailed(CannotRecord):
    """Error for an operator with a lowering that fails in JAX for these shapes or dtypes."""

    def __init__(self, operator: str, stack_trace: str | None, error: Exception):
        first = str(error).partition("\n")[0]
        where = source_line(stack_trace) or "an unknown line"
        super().__init__(
            f"{operator} fails in JAX ({type(error).__name__}: {first}) at {where}. "
            "Rewrite the line with other operators, or give JAX your own: torch_bridge.lowering.register("
            f'"{operator}", lambda call, *args: ...)'
        )


ADVICE_OPERATORS = (
    "Give JAX the missing operators, torch_bridge.lowering.register(NAME, lambda call, *args: ...), or rewrite these "
    "lines with operators of torch_bridge.lowering.TABLE."
)
ADVICE_DATA = (
    "JAX fixes every shape and branch before it sees the numbers: rewrite these lines with torch.where, a mask, or "
    "torch.cond (docs/from_torch.md, What cannot be converted)."
)
ADVICE_LIBRARY = (
    "Write it with torch or do it in the Dataset; or train with jaxtrain.compile, which leaves such a loss to torch."
)
ADVICE_RECORD = (
    "TorchDynamo, which captures modules for JAX, stops there: torch.compile(module, fullgraph=True, backend='eager') "
    "shows its traceback. Rewrite the line, or do that part in the Dataset."
)
ADVICE_STATE = (
    "Python runs once, while the module is captured. Keep what changes in a buffer (self.register_buffer('step', "
    "torch.zeros(())), then self.step += 1), draw random numbers with torch (torch.rand), and pass what comes from "
    "outside as an input."
)
ADVICE_FAULT = "Mend the module or its inputs until module(*inputs) runs in torch."
ADVICE_READY = "JAX trains a torch.nn.Module that can be called as it is, whose parameters have memory of their own."
ADVICE_WRITTEN = (
    "The optimizer writes parameters: compute with a changed copy (w = self.weight.clamp(0)), with "
    "torch.nn.utils.parametrize, or write them between steps."
)

ADVICE_HOOKS = (
    "Remove these hooks before converting, or register them on tensors: tensor.register_hook inside forward, "
    "parameter.register_hook outside."
)

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n\s+(?P<code>[^\n]+))?')
_LIBRARY = os.path.dirname(os.__file__)  # of Python itself
_CALLERS = ("jaxtrain/compiled_step/", "torch_bridge/capture/module_call.py", "torch_bridge/from_torch.py")
_TOOLS = ("/networkx/", "/sympy/", "/jax/", "/jaxlib/", "/flatbuffers/", "/typing_extensions.py", "jaxtrain/runtime/")
_TRACED = "<eval_with_key>"  # code that torch has generated; the file is followed by a number
INTERNAL = ("/torch/_", "/torch/fx/", "/torch/export/", "torch_bridge/")  # what records: no line of it is a reason
_INTERNALS = re.compile(
    r"\bSym(Int|Float|Bool|Node)\b|FakeTensor|FunctionalTensor|Proxy|GuardOn|guard on|aot_autograd|symbolic|unbacked|"
    r"\b[uszf]\d+\b|dispatch|torch\._|aten\.|infer dtype of|lifted|tracing|export|fake mode|subclass|LeafSpec|pytree"
)
MACHINERY = ("torch_bridge/", "/torch/", "/contextlib.py", "<string>", _TRACED)


def source_place(stack_trace: str | None) -> tuple[str, int] | None:
    """Return file and line of the innermost frame outside torch and this library; None if there is none."""
    frames = [frame for frame in _FRAME.finditer(stack_trace or "") if not frame["file"].startswith(_TRACED)]
    outside = _users([frame for frame in frames if not any(part in frame["file"] for part in MACHINERY)])
    return (outside[-1]["file"], int(outside[-1]["line"])) if outside else None


def _users(frames: list) -> list:
    """Return the frames outside of Python's own library; all, if each is inside."""
    users = [frame for frame in frames if not frame["file"].startswith(_LIBRARY) or "site-packages" in frame["file"]]
    return users or frames


def source_line(stack_trace: str | None, own: bool = False) -> str:
    """Return `file:line  code` of the innermost frame outside torch and this library. If there is none, return the
    innermost frame of all, or "" with `own`."""
    frames = [frame for frame in _FRAME.finditer(stack_trace or "") if not frame["file"].startswith(_TRACED)]
    outside = _users([frame for frame in frames if not any(part in frame["file"] for part in MACHINERY)])
    frames = outside or ([] if own else [frame for frame in frames if not any(p in frame["file"] for p in INTERNAL)])
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame['file']}:{frame['line']}  {(frame['code'] or '').strip()}".rstrip()


def written_line(code: Any, number: int) -> str:
    """Return a line of a code object's file, preceded by its file and number."""
    return f"{code.co_filename}:{number}  {linecache.getline(code.co_filename, number).strip()}"


def exception_line(error: BaseException) -> str:
    """Return the innermost line of user code that led to an exception; "" if there is none."""
    return source_line("".join(traceback.format_tb(error.__traceback__)), own=True)


def line_in(frame: types.FrameType | None) -> str:
    """Return the innermost line of user code on a stack that ends at this frame; "" if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _CALLERS):
            return ""  # what follows has called for the record
        library = "<" in file or file.startswith(_LIBRARY) and "site-packages" not in file
        if not library and not any(part in file for part in (*MACHINERY, *_TOOLS)):
            return written_line(frame.f_code, frame.f_lineno)[:160].rstrip()
        frame = frame.f_back
    return ""


def speaks_of_internals(text: str) -> bool:
    """Return True if an error's text names what torch records with: it says nothing to a user."""
    return _INTERNALS.search(text) is not None


def code_line(function: Any) -> str:
    """Return `file:line  name` of a function, a method or a partial of one."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}  {code.co_name}" if code is not None else repr(function)


def module_path(node) -> str:
    """Return the submodule that a graph's node comes from, as in `encoder.layers.0 (MyLayer)`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__name__
    path = re.sub(r"^(L\['self'\])?\.?(wrapped_module)?\.?", "", path)
    return f"{path} ({kind.rsplit('.', 1)[-1]})" if path else kind.rsplit(".", 1)[-1]


def merge(obstacles: Iterable[Obstacle]) -> list[Obstacle]:
    """Merge equal obstacles at the same line into one, which tells how many more submodules meet it."""
    groups: dict[tuple, list[Obstacle]] = {}
    for obstacle in obstacles:
        groups.setdefault((obstacle.what, obstacle.where), []).append(obstacle)
    merged = []
    for (what, where), members in groups.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        merged.append(Obstacle(what, where, members[0].module + more if members[0].module else ""))
    return merged
