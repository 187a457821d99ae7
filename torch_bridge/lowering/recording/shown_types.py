"""Show the user's own code the types that it sees in torch, while a module is recorded.

Torch gives a record tensors of a class of its own, and sizes that are no int; a Python number that changes from call to
call is a 0-d tensor there. User code that asks for their type would take another branch than in torch. Libraries know
all of them and see the real types.
"""

import builtins
import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from torch_bridge.lowering.errors import Unanswerable
from torch_bridge.lowering.python.answers import Answers, Conditions, Of, Unknown
from torch_bridge.lowering.python.names import OWN_STATE, of_library_file
from torch_bridge.lowering.recording.batch_items import HiddenText, refusals, refuse

_NUMBERS: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
_METHODS = {value for kind in torch.Tensor.__mro__ for value in vars(kind).values() if callable(value)}
# By id: a 0-d tensor, the number that it stands for or one of its type, and how Python computes it if that is known.
_STANDING: dict[int, tuple[torch.Tensor, Any, tuple[Answers, Of] | None]] = {}
_IDS: dict[int, int] = {}  # of a parameter, by that of what stands for it
_OPERATORS = set(
    "add radd sub rsub mul rmul div truediv rtruediv true_divide floordiv rfloordiv floor_divide mod rmod remainder "
    "pow rpow neg pos positive abs eq ne lt le gt ge bool int float index complex hash real".split()
)
_NO_NUMBER = {"__len__": "has no len()", "__iter__": "is not iterable", "__getitem__": "is not subscriptable"}


def _type(*arguments: Any, **options: Any) -> Any:
    if len(arguments) != 1 or options:
        return builtins.type(*arguments, **options)
    value, kind = arguments[0], builtins.type(arguments[0])
    if id(value) in _STANDING:
        return builtins.type(_STANDING[id(value)][1])
    if kind is HiddenText:
        return str
    if kind in (FakeTensor, FunctionalTensor):
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    return builtins.type(_NUMBERS[kind]) if kind in _NUMBERS else kind


def _id(value: Any) -> int:
    return _IDS.get(id(value), id(value))


def _is_instance(value: Any, kinds: Any) -> bool:
    if isinstance(kinds, tuple):
        return any(_is_instance(value, kind) for kind in kinds)
    kinds = builtins.type if kinds is _type else kinds
    if id(value) in _STANDING:
        return isinstance(_STANDING[id(value)][1], kinds)
    number = _NUMBERS.get(builtins.type(value))
    return isinstance(value, kinds) or (number is not None and isinstance(number, kinds))


def _has_attribute(value: Any, name: str) -> bool:
    return hasattr(_STANDING[id(value)][1] if id(value) in _STANDING else value, name)


def _attribute(value: Any, name: str, *default: Any) -> Any:
    lacking = id(value) in _STANDING and not hasattr(_STANDING[id(value)][1], name)
    return getattr(_STANDING[id(value)][1] if lacking else value, name, *default)


class Asked:
    """Numbers among a record's inputs, by position, and the conditions of the calls while it is made."""

    __slots__ = ("conditions", "numbers")

    def __init__(self, numbers: Mapping[int, Any]) -> None:
        self.numbers = numbers
        self.conditions: list[Conditions] = []

    def add(self, conditions: Conditions) -> None:
        """Add what one call has asked, unless another has asked the same."""
        if conditions.asked and repr(conditions) not in map(repr, self.conditions):
            self.conditions.append(conditions)


@contextlib.contextmanager
def as_numbers(inputs: Sequence[Any], asked: Asked) -> Iterator[None]:
    """While active, 0-d tensors among a record's inputs are shown as the Python numbers that they stand for, by
    `torch.is_tensor` too. asked: these numbers; receives what Python asks of them, which the present ones answer.
    Raises Unanswerable at the end if user code has caught a read that nothing answers."""
    before, plain, numbers = dict(_STANDING), torch.is_tensor, asked.numbers
    answers = Answers(numbers)
    for place, of in answers.numbers().items():
        _STANDING[id(inputs[place])] = inputs[place], numbers[place], (answers, of)
    shown: dict[str, Any] = {"is_tensor": lambda value: id(value) not in _STANDING and plain(value)}
    shown |= {name: _making(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    try:
        with contextlib.ExitStack() as stack:
            for name, function in shown.items() if numbers else ():
                stack.enter_context(mock.patch.object(torch, name, function))
            for name, function in _OF_NUMBERS.items() if numbers else ():
                stack.enter_context(mock.patch.object(torch.Tensor, name, function, create=True))
            if numbers:
                scalar = np.isscalar
                stack.enter_context(mock.patch.object(np, "isscalar", lambda value: is_number(value) or scalar(value)))
            refusals.clear()
            yield
        if refusals:
            raise Unanswerable(refusals[0])
        asked.add(answers.conditions())
    finally:
        _STANDING.clear()
        _STANDING.update(before)


def _making(function: Callable) -> Callable:
    """Return torch.tensor, or torch.as_tensor, for data that may hold such numbers."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return (made_of if holds_numbers(args, kwargs) else function)(*args, **kwargs)

    return make


def holds_numbers(*given: Any) -> bool:
    """Return True if one of these nested values is a number of the record: an input, or a size that is a symbol."""
    symbols = (torch.SymInt, torch.SymFloat)
    return any(id(x) in _STANDING or issubclass(builtins.type(x), symbols) for x in pytree.tree_leaves(given))


def made_of(data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any) -> torch.Tensor:
    """Make a tensor of nested numbers as torch.tensor does, some of which are numbers of the record."""
    numbers = [_STANDING[id(leaf)][1] if id(leaf) in _STANDING else leaf for leaf in pytree.tree_leaves(data)]
    real = any(isinstance(number, (float, torch.SymFloat)) for number in numbers)
    made = _stacked(data, dtype or (torch.get_default_dtype() if real else torch.int64), device)
    _STANDING.pop(id(made), None)
    return made.requires_grad_() if requires_grad else made


def _stacked(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(item, dtype, device) for item in data])
    if id(data) in _STANDING:
        return data.to(device=device, dtype=dtype, copy=True)
    if isinstance(data, (torch.SymInt, torch.SymFloat)):
        return torch.scalar_tensor(cast(Any, data), dtype=dtype, device=device)
    return torch.full((), data, dtype=dtype, device=device)


def is_number(value: Any) -> bool:
    """Return True for a 0-d tensor that stands for a Python number."""
    return id(value) in _STANDING


def check_asked(function: Any, args: Sequence[Any]) -> None:
    """Raise what Python raises where user code asks a number for what only a tensor has: `t.shape`, `t.item()`. To be
    called where user code has called the function."""
    name = getattr(function, "__name__", "")
    name = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name
    if name in ("__format__", "__repr__"):
        refuse(_READ)
    if name.strip("_") in _OPERATORS or (function not in _METHODS and getattr(function, "__name__", "") != "__get__"):
        return
    kind = builtins.type(_STANDING[id(args[0])][1]).__name__
    if name in _NO_NUMBER:
        raise TypeError(f"{kind!r} object {_NO_NUMBER[name]}")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")


_READ = "Python needs the value of a number that changes from call to call: as a text, as a key or in a library"


def check_read(value: Any) -> None:
    """Raise Unanswerable where Python reads the value of such a number."""
    if is_number(value):
        refuse(_READ)


def answer(function: Any, args: Sequence[Any]) -> Any:
    """Return what Python gets of such a number from `bool`, `int`, `float`, `range` or `round`, as a condition of the
    record. Raises Unanswerable if its value is not known."""
    return _answered(function.__name__.strip("_"), args)


def _answered(name: str, args: Sequence[Any]) -> Any:
    answers, arguments = _followed(args)
    if answers is None:
        refuse(_READ)
    try:
        return answers.ask(name, arguments)
    except Unknown:
        refuse(_READ)


def _followed(args: Sequence[Any]) -> tuple[Answers | None, list[Any]]:
    """Return the arguments with what is known in place of such numbers; None if one is not known."""
    known = [_STANDING[id(value)][2] if id(value) in _STANDING else (None, value) for value in args]
    if None in known:
        return None, []
    found = [pair for pair in known if pair is not None]
    logs = {id(log): log for log, _ in found if log is not None}
    return (next(iter(logs.values())) if len(logs) == 1 else None), [argument for _, argument in found]


def _hash(tensor: torch.Tensor) -> int:
    """Replace Tensor.__hash__, for numbers that user code looks up in a dict or a set."""
    if not of_library_file(sys._getframe(1).f_code.co_filename):
        check_read(tensor)
    return id(tensor)


def _get_missing(tensor: torch.Tensor, name: str) -> Any:
    """Refuse what a number has and a tensor lacks, `n.bit_length()`: code may try it."""
    if is_number(tensor) and hasattr(_STANDING[id(tensor)][1], name):
        refuse(_READ)
    raise AttributeError(f"'Tensor' object has no attribute {name!r}")


def _missing(name: str) -> Callable:
    """Return an operator that numbers have and tensors lack."""

    def operate(tensor: torch.Tensor, *args: Any) -> Any:
        if is_number(tensor):
            return _answered(name.strip("_"), (tensor, *args))
        if name in ("__divmod__", "__rdivmod__"):
            return NotImplemented
        raise TypeError(f"type Tensor doesn't define {name} method")

    return operate


_OF_NUMBERS = {
    name: _missing(name)
    for name in ("__divmod__", "__rdivmod__", "__round__", "__trunc__", "__floor__", "__ceil__")
    if not hasattr(torch.Tensor, name)
} | {"__hash__": _hash, "__getattr__": _get_missing}


def note_number(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Show what Python computes of such numbers alone as a number too. A function of torch makes a tensor of them; the
    methods that are called are the operators, as a number has no other."""
    if not _STANDING or function not in _METHODS or not isinstance(result, torch.Tensor):
        return
    if all(id(value) in _STANDING for value in args if isinstance(value, torch.Tensor)):
        real, truth = result.is_floating_point(), result.dtype is torch.bool
        shown: Any = 1.0 if real else True if truth else 1
        answers, arguments = _followed(args)
        _STANDING[id(result)] = result, shown, None
        if answers is None or kwargs:
            return
        with contextlib.suppress(Unknown):
            number = answers.compute(function.__name__.strip("_"), arguments)
            value = answers.value(number)
            if type(value) is type(shown):
                _STANDING[id(result)] = result, value, (answers, number)


@contextlib.contextmanager
def with_ids(ids: Mapping[int, int]) -> Iterator[None]:
    """While active, `id` is for user code that of a parameter. ids: by that of what stands for the parameter."""
    _IDS.update(ids)
    try:
        yield
    finally:
        _IDS.clear()


@contextlib.contextmanager
def as_in_torch() -> Iterator[None]:
    """While active, functions of this file stand in the globals of user modules, before the builtins."""
    shown = {"type": _type, "isinstance": _is_instance, "hasattr": _has_attribute, "getattr": _attribute, "id": _id}
    changed = [(names, key) for names in _globals_of_users() for key in shown if key not in names]
    try:
        for names, key in changed:
            names[key] = shown[key]
        yield
    finally:
        for names, key in changed:
            names.pop(key, None)


def _globals_of_users() -> list[dict[str, Any]]:
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else ""
        own = name.partition(".")[0] not in OWN_STATE and not of_library_file(file) if file else name == "__main__"
        if own:
            found[id(module)] = vars(module)  # a script's module has two names
    return list(found.values())
