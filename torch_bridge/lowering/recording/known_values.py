"""Values that Python reads out of tensors while a module is recorded, where they can be known.

A tensor that depends on no input, such as `torch.arange(n)`, a mask kept as a buffer or a grid of times from outside,
has the same values at every call, so they are computed when Python reads them. A check of values, `assert mask.any()`
or `if bad.any(): raise ...`, is assumed to pass.
"""

import ast
import functools
import linecache
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_bridge.lazy_scalar import LazyScalar
from torch_bridge.lowering.errors import Untrained, source_line
from torch_bridge.lowering.recording import elsewhere, unregistered

MOST_ELEMENTS = 1 << 22  # larger constants are not computed when read


class KnownValues:
    """Track which tensors of one export have known values.

    module: the recorded one; its buffers have their present numbers. checks: lines of checks assumed to pass.
    read: buffers that were read, with the line.
    captured: tensors from outside the module that the call used, as in a closure, which the record keeps as constants.
    """

    def __init__(self, module: torch.nn.Module | None):
        self.module = module
        self.buffers = dict(module.named_buffers()) if module is not None else {}
        self.checks: list[str] = []
        self.read: dict[str, str] = {}
        self.captured: dict[int, torch.Tensor] = {}
        self._own = {id(tensor) for tensor in (module.parameters() if module is not None else ())}
        self._own |= {id(tensor) for tensor in self.buffers.values()}
        self._active = False
        self._recipes: dict[int, tuple] = {}  # by id: the tensor (so that the id stays unique), how it was made
        self._places: dict[int, tuple[str, int | None]] = {}  # by id of a buffer's stand-in: its name and memory

    def begin(self) -> None:
        """Begin a call: torch.export has put stand-ins in place of the module's buffers."""
        self._recipes.clear()
        self._active = True
        buffers = self.module.named_buffers() if self.module else ()
        self._places = {id(value): (name, _memory(value)) for name, value in buffers}

    def end(self) -> None:
        """End the call."""
        self._active = False

    def check_written(self, function: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raise NotImplementedError if a call would write to a tensor from outside the module, which is no stand-in."""
        if self._active and any(map(self._is_elsewhere, elsewhere.written(function, args, kwargs))):
            raise NotImplementedError(elsewhere.WRITES)

    def _is_elsewhere(self, tensor: Any) -> bool:
        """Return True for a tensor from outside; the module's own and the inputs are stand-ins while it is recorded."""
        return type(tensor) in (torch.Tensor, torch.nn.Parameter) and id(tensor) not in self._own and _in_memory(tensor)

    def note(self, function: Any, args: tuple, kwargs: Mapping[str, Any], result: Any) -> None:
        """Remember how a tensor was made, if all that it was made of is known."""
        if self._active:
            for leaf in pytree.tree_leaves((args, kwargs)):
                leaf = leaf.tensor() if isinstance(leaf, LazyScalar) else leaf  # what torch computes with
                if self._is_elsewhere(leaf):
                    self.captured[id(leaf)] = leaf
                    if leaf.requires_grad and torch.is_grad_enabled():
                        raise Untrained(unregistered.refusal(self.module, leaf))
        if written := elsewhere.written(function, args, kwargs):
            memories = set(map(_memory, written))  # of tensors that have changed too
            self._recipes = {key: made for key, made in self._recipes.items() if _memory(made[0]) not in memories}
            self._places = {key: place for key, place in self._places.items() if place[1] not in memories}
            return
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not results or not all(isinstance(item, torch.Tensor) and _small(item) for item in results):
            return
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)) for leaf in leaves):
            return
        if all(self._is_known(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
            given = set(map(id, leaves))
            for number, item in enumerate(results):
                if id(item) not in given:  # x.to(x.dtype) is x
                    self._recipes[id(item)] = (item, function, args, kwargs, None if item is result else number)

    def value(self, tensor: Any) -> torch.Tensor | None:
        """Return the values of a tensor that depends on no input; None for any other."""
        if not isinstance(tensor, torch.Tensor) or not self._is_known(tensor):
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            before = torch.get_rng_state()
            try:
                value = self._computed(tensor)
            except Exception:  # an operator that cannot run here: the value stays unknown
                return None
            if not torch.equal(before, torch.get_rng_state()):  # random, so not constant
                torch.set_rng_state(before)
                return None
        return value

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._recipes or id(tensor) in self._places or self._is_constant(tensor)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor from outside that nobody trains. The record is kept while it stays as it is."""
        return self._active and not tensor.requires_grad and self._is_elsewhere(tensor)

    def _computed(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._places and id(tensor) not in self._recipes:
            name, _ = self._places[id(tensor)]
            self.read.setdefault(name, source_line("".join(traceback.format_stack())))
            return self.buffers[name]
        if self._is_constant(tensor):
            self.captured[id(tensor)] = tensor
            return tensor
        _, function, args, kwargs, number = self._recipes[id(tensor)]
        real = lambda leaf: self._computed(leaf) if isinstance(leaf, torch.Tensor) else leaf
        args, kwargs = pytree.tree_map(real, (args, kwargs))
        result = function(*args, **kwargs)
        return result if number is None else result[number]

    def passed(self, frame: Any) -> bool | None:
        """Return the truth that lets a check pass, if this frame asks for a tensor's truth in one; else None."""
        found = _check_at(frame)
        if found is None:
            return None
        truth, line = found
        self.checks.append(line)
        return truth


def _in_memory(tensor: torch.Tensor) -> bool:
    """Return False for the stand-ins of torch.func's transforms, which are of torch.Tensor's own class."""
    if not _known_sizes(tensor):
        return False
    try:
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False


def _memory(tensor: torch.Tensor) -> int | None:
    """Return what tensors that share memory have in common; None if the tensor has no memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _known_sizes(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in tensor.shape)


def _small(tensor: torch.Tensor) -> bool:
    return _known_sizes(tensor) and tensor.shape.numel() <= MOST_ELEMENTS


def _check_at(frame: Any) -> tuple[bool, str] | None:
    code = frame.f_code
    places = list(code.co_positions())
    index = frame.f_lasti // 2
    if index >= len(places) or None in places[index]:
        return None
    first, _, start, _ = places[index]
    for statement, wanted in _checks_of(code.co_filename):
        line = f"{code.co_filename}:{statement.lineno}"
        if _holds(statement.test, first, start):
            return _wanted(statement.test, wanted, first, start), line
        if (statement.lineno, statement.col_offset) == (first, start):  # the jump belongs to the whole statement
            outcomes = {_wanted(part, wanted, part.lineno, part.col_offset) for part in _parts(statement.test)}
            return (outcomes.pop(), line) if len(outcomes) == 1 else None
    return None


@functools.lru_cache(maxsize=256)
def _checks_of(file: str) -> list[tuple[Any, bool]]:
    """Return a file's assert statements and its `if ...: raise` without else, with the truth that passes the test."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found: list[tuple[Any, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node, True))
        elif isinstance(node, ast.If) and not node.orelse and all(isinstance(s, ast.Raise) for s in node.body):
            found.append((node, False))
    return found


def _holds(node: ast.expr, line: int, column: int) -> bool:
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno, node.end_col_offset)


def _parts(test: ast.expr) -> list[ast.expr]:
    """Return the operands of a test's `and` and `or`, whose truth decides it, each with its position."""
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in _parts(value)]
    return [test]


def _wanted(test: ast.expr, truth: bool, line: int, column: int) -> bool:
    """Return the truth of the operand at this position that lets the test have this truth."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _wanted(test.operand, not truth, line, column)
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            if _holds(value, line, column):
                return _wanted(value, truth, line, column)
    return truth
