"""Say why a module or a loss is not one graph: everything in the way, with the user's lines and what to write."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.capture import decompositions, torch_api
from torch_bridge.capture.reasons import stopped_by
from torch_bridge.lowering import foreseen
from torch_bridge.lowering.errors import (
    ADVICE_DATA,
    ADVICE_FAULT,
    ADVICE_LIBRARY,
    ADVICE_OPERATORS,
    ADVICE_RECORD,
    CannotRecord,
    Obstacle,
    UnsupportedModel,
    WritesOutside,
    exception_line,
    merge,
    source_line,
)
from torch_bridge.lowering.outside_writes import WRITES, Untouched
from torch_bridge.lowering.python.effects import only_reading
from torch_bridge.lowering.recording_lock import quiet


def unsupported(entry: torch.nn.Module, inputs: tuple, error: Exception) -> Exception:
    """Return the error to raise for a capture that `error` has stopped. entry: wraps the module, as
    `entry.wrapped_module`. inputs: the arguments of `entry`, with values.

    What torch raises too, a copy of the module raises here: UnsupportedModel with `fails_in_torch`, or a UserError of
    the entry's own.
    """
    name = type(getattr(entry, "wrapped_module", entry)).__name__
    if isinstance(error, UnsupportedModel):
        return error
    if isinstance(error, decompositions.NoLowering):
        return UnsupportedModel(name, merge(error.obstacles), ADVICE_OPERATORS)
    if not isinstance(error, CannotRecord):
        fault = own_fault(entry, inputs)
        if isinstance(fault, UserError):
            return fault
        if fault is not None:
            what = f"{type(fault).__name__}: {_first_line(fault)}"
            found = UnsupportedModel(name, [Obstacle(what, exception_line(fault))], ADVICE_FAULT)
            found.__cause__ = fault
            return found
    words = str(error) if isinstance(error, CannotRecord) else stopped_by(error)
    what, _, where = words.partition(", at ")
    where = where or source_line(torch_api.user_stack(error), own=True)
    where = where or ("" if isinstance(error, CannotRecord) else exception_line(error))
    told = isinstance(error, CannotRecord) or what.endswith(")")  # the words say what to write
    advice = ADVICE_DATA if "values of a tensor" in what else "" if told else ADVICE_RECORD
    return UnsupportedModel(name, [Obstacle(what, where)], advice)


def refused_at_sight(module: torch.nn.Module, inputs: tuple) -> UnsupportedModel | None:
    """Return the error for a large module that does in torch what no graph can hold; None if it does nothing such."""
    inner = list(module.modules())
    functions: Iterable = [value for value in vars(module).values() if callable(value)]
    if len(inner) < foreseen.MANY or not foreseen.reached(functions, inner):
        return None
    look = foreseen.Look()
    own_fault(module, inputs, look.watching)
    if not look.refusal:
        return None
    advice = ADVICE_OPERATORS if "lowering" in look.refusal else ADVICE_LIBRARY
    name = type(getattr(module, "wrapped_module", module)).__name__
    return UnsupportedModel(name, [Obstacle(look.refusal, look.line)], advice)


def own_fault(
    module: torch.nn.Module, inputs: tuple, watching: Callable[[list], Any] = lambda _: contextlib.nullcontext()
) -> Exception | None:
    """Return the error that a copy of the module raises when torch calls it; None if it runs. watching: returns a
    context for the call, of the copy's tensors and the inputs."""
    try:
        copied = copy.deepcopy(module)
    except Exception:  # what cannot be copied is not called: a call may change it
        return None
    inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)
    given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    try:
        tensors = [*copied.parameters(), *copied.buffers(), *given]
        with quiet(), only_reading(), Untouched(tensors), watching(tensors):
            copied(*inputs)
    except WritesOutside:
        return None
    except Exception as error:
        return None if str(error) == WRITES else error
    return None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:300]
