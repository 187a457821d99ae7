"""The lines of a plain torch loop between a batch and `backward()`, as the loss function that `jaxtrain.compile` takes.

A script's own code is read, once it has run: which statements lead to the loss of an update, and which values they
read. Nothing of the script is run for that.
"""

import ast
import linecache
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_bridge.script_watch import Line, Update
from torch_bridge.step_rules import shapes_of

LOSS = "loss"  # name of the function that is made
BATCH = "batch"
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Yield, ast.YieldFrom, ast.Await)


class CannotExtract(Exception):
    """The loss of a loop does not stand in one block of statements; the text says what is in the way."""


class Loop(NamedTuple):
    """A loop's loss. loss_fn: (modules, batch) -> the tensor whose backward() the script calls. batches: what it reads,
    one for each update. first, last: its lines. backward: the line of that call. modules: that it trains."""

    file: str
    first: int
    last: int
    backward: int
    loss_fn: Callable[[Any, Any], Any]
    batches: list[dict[str, Any]]
    modules: list[torch.nn.Module]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")

    @property
    def shapes(self) -> int:
        """How many sets of shapes the batches have."""
        return len({shapes_of(batch) for batch in self.batches})


def joined(loop: Loop) -> torch.nn.Module:
    """Return one module that holds those of a loop."""
    return torch.nn.ModuleList(loop.modules)


def loop_of(updates: list[Update]) -> Loop:
    """Return the loss of one optimizer's updates. Raises CannotExtract."""
    first = updates[0]
    if not first.calls:
        raise CannotExtract("no module was called before the update")
    seen = {id(line.frame): line for line in first.lines}
    for line in (line for called in first.calls for line in called.lines):
        function = _function(line)
        before = seen[id(line.frame)].number if id(line.frame) in seen else None
        calls = _backward_calls(function, before)
        if calls:
            return _extracted(updates, line, function, calls[-1])
    raise CannotExtract("no line of the script's calls backward() on a tensor")


def _extracted(updates: list[Update], line: Line, function: ast.AST, call: ast.Call) -> Loop:
    code = line.frame.f_code
    numbers = {each.number for called in updates[0].calls for each in called.lines if each.frame.f_code is code}
    block, start, end = _block(function, call, numbers)
    receiver = _receiver(call)
    kept = _leading_to(block[start:end], receiver)
    if any(isinstance(node, _JUMPS) for statement in kept for node in _outside_loops(statement)):
        raise CannotExtract(
            f"{code.co_filename}:{kept[0].lineno}: a continue, break or return stands before backward()"
        )
    read, stored = _names([*kept, receiver])
    values = [_values(update, code) for update in updates]
    tensors = {name for name in read if name in values[0] and _holds_tensors(values[0][name])}
    rebound = {name for name in read & stored if name in values[0]} - tensors
    namespace = {**line.frame.f_globals, **values[0]}
    first = kept[0].lineno if kept else call.lineno
    loss_fn = _compiled(kept, receiver, tensors, rebound, code.co_filename, first, namespace)
    batches = [{name: found[name] for name in sorted(tensors)} for found in values if tensors <= set(found)]
    modules = list({id(each.module): each.module for each in updates[0].calls}.values())
    last = max((statement.end_lineno or statement.lineno for statement in kept), default=call.lineno)
    return Loop(code.co_filename, first, last, call.lineno, loss_fn, batches, modules)


def _function(line: Line) -> ast.AST:
    """Return the syntax tree of the function, or the file, that a line belongs to."""
    code = line.frame.f_code
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return ast.Module([], [])
    if code.co_name == "<module>":
        return tree
    named = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name
        and min(d.lineno for d in [node, *node.decorator_list]) <= line.number <= (node.end_lineno or node.lineno)
    ]  # fmt: skip
    return named[-1] if named else ast.Module([], [])


def _statements(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements in a function or a file, outer ones first, without those of functions in it."""
    for name in _BLOCKS:
        block = getattr(node, name, None) or []
        if block and isinstance(block, list):
            if isinstance(block[0], ast.stmt):
                yield block
            for inner in block:
                if not isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                    yield from _statements(inner)


def _backward_calls(function: ast.AST, before: int | None) -> list[ast.Call]:
    """Return the calls of backward() in a function, in order, up to a line."""
    found = {
        id(node): node
        for block in _statements(function)
        for statement in block
        if isinstance(statement, ast.Expr | ast.Assign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    }
    return sorted(
        (node for node in found.values() if before is None or node.lineno <= before), key=lambda node: node.lineno
    )


def _block(function: ast.AST, call: ast.Call, numbers: set[int]) -> tuple[list[ast.stmt], int, int]:
    """Return the innermost list of statements with both a call of a module and backward(), and the places of the
    statements that hold them."""
    holds = lambda statement, number: statement.lineno <= number <= (statement.end_lineno or statement.lineno)
    found = None
    for block in _statements(function):
        ends = [i for i, statement in enumerate(block) if holds(statement, call.lineno)]
        starts = [i for i, statement in enumerate(block) if any(holds(statement, number) for number in numbers)]
        if ends and starts and starts[0] <= ends[0] and not (starts[0] == ends[0] and not _simple(block[ends[0]])):
            found = block, starts[0], ends[0]
    if found is None:
        raise CannotExtract(f"line {call.lineno}: backward() and the module's call stand in different blocks")
    return found


def _simple(statement: ast.stmt) -> bool:
    return not any(getattr(statement, name, None) for name in _BLOCKS)


def _receiver(call: ast.Call) -> ast.expr:
    """Return the loss in `loss.backward()`, `scaler.scale(loss).backward()` and `accelerator.backward(loss)`."""
    assert isinstance(call.func, ast.Attribute)
    if call.args:
        return call.args[0]
    value = call.func.value
    scaled = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "scale"
    return value.args[0] if scaled and isinstance(value, ast.Call) and value.args else value


def _leading_to(statements: list[ast.stmt], receiver: ast.expr) -> list[ast.stmt]:
    """Return the statements that the loss needs: those that store a name it reads, or change such an object."""
    needed, kept = _names([receiver])[0], []
    for statement in reversed(statements):
        read, stored = _names([statement])
        changed = {_root(node.func.value) for node in ast.walk(statement) if _is_change(node)}
        if needed & (stored | changed):
            kept.append(statement)
            needed |= read
    return kept[::-1]


def _is_change(node: ast.AST) -> bool:
    """Return True for a call that changes its object: `x.mul_(2)`, `losses.append(loss)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name = node.func.attr
    return (name.endswith("_") and not name.endswith("__")) or name in ("append", "extend", "update", "insert", "add")


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names(nodes: list[Any]) -> tuple[set[str], set[str]]:
    """Return the names that are read and those that are stored; what is stored into an object stores its name."""
    read, stored = set(), set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            stored.add(_root(node))
        elif isinstance(node, ast.AugAssign):
            read.add(_root(node.target))
    return read, stored


def _outside_loops(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement's nodes, without those of loops and functions in it."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, ast.For | ast.While | ast.FunctionDef | ast.Lambda):
            yield from _outside_loops(inner)


def _values(update: Update, code: Any) -> dict[str, Any]:
    """Return what the names of a function's were at the first call of a module in it, before an update."""
    lines = (line for called in update.calls for line in called.lines if line.frame.f_code is code)
    return next((line.values for line in lines), {})


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.nn.Parameter) or callable(value):
        return False
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return hasattr(value, "to") and any(
        isinstance(each, torch.Tensor) for each in getattr(value, "__dict__", {}).values()
    )


def _compiled(
    kept: list[ast.stmt],
    receiver: ast.expr,
    tensors: set[str],
    rebound: set[str],
    file: str,
    first: int,
    namespace: dict,
) -> Callable[[Any, Any], Any]:
    """Return the function of these statements, with the script's line numbers. rebound: names that the statements both
    read and store, whose values come in as defaults."""
    defaults: list[ast.expr] = [ast.Name(name, ast.Load()) for name in sorted(rebound)]
    names = [ast.arg(name) for name in ("modules", BATCH, *sorted(rebound))]
    arguments = ast.arguments([], names, None, [], [], None, defaults)
    given = [
        ast.Assign(
            [ast.Name(name, ast.Store())], ast.Subscript(ast.Name(BATCH, ast.Load()), ast.Constant(name), ast.Load())
        )
        for name in sorted(tensors)
    ]
    body = [*given, *kept, ast.Return(receiver)]
    last = max(getattr(node, "end_lineno", None) or first for node in [*kept, receiver])
    function = ast.FunctionDef(LOSS, arguments, body, [], lineno=first, end_lineno=last, col_offset=0, end_col_offset=0)
    for node in (*given, body[-1]):
        where = receiver.lineno if node is body[-1] else first
        node.lineno = node.end_lineno = where
        node.col_offset = node.end_col_offset = 0
    tree = ast.fix_missing_locations(ast.Module([function], []))
    scope = dict(namespace)
    exec(compile(tree, file, "exec"), scope)  # the user's own statements
    return scope[LOSS]
