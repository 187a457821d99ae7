"""Work out how to call a user's loss or metric: (output, batch), (output, target), or with further batch entries."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

TARGETS = ("labels", "label", "target", "targets", "y")  # names of a target in a batch; the first found counts
_NAMES = {*TARGETS, "t", "gt", "truth", "true", "y_true", "ytrue", "tgt", "ground_truth"}
_OUTPUTS = set("output outputs out logits pred preds prediction predictions y_pred ypred y_hat yhat scores".split())
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of a loss call. positional: the batch entry for each, None for the output. named: (argument name, batch
    entry) pairs."""

    positional: tuple[str | None, ...]
    named: tuple[tuple[str, str], ...] = ()

    def call(self, function: Callable, output: Any, batch: Mapping[str, Any]) -> Any:
        given = [output if entry is None else batch[entry] for entry in self.positional]
        return function(*given, **{argument: batch[entry] for argument, entry in self.named})


def names_target(function: Callable) -> bool:
    """Return True if one of the first two arguments is named like a target and the other may be the output."""
    names = [p.name for p in _parameters(function)]
    return len(names) > 1 and (_is(names[1], _NAMES) or _swapped(names))


def arguments_of(
    function: Callable, entries: Sequence[str], target: str | None, free: Sequence[str] = (), compares: bool = True
) -> Arguments | None:
    """Match a function's argument names to batch entries; return None where the names are not enough.

    entries: names of the batch's entries. target: the entry that outputs are compared with. free: for a dataset of
    tuples, the entries that the module does not take; if their number fits, the arguments get them in order. compares:
    the second argument is the target, whatever its name.
    """
    parameters = _parameters(function)
    names = [p.name for p in parameters]
    swapped = _swapped(names)
    places = {1 - swapped: target} if target is not None else {}
    if not (swapped or compares or len(names) > 1 and _is(names[1], _NAMES)):
        places = {}
    found: dict[int, str | None] = {int(swapped): None}
    for place, parameter in enumerate(parameters):
        if place in found:
            continue
        needed = parameter.default is parameter.empty
        entry = parameter.name if parameter.name in entries and (needed or not _from_torch(function)) else None
        entry = entry or places.get(place)
        if entry is not None:
            found[place] = entry
        elif needed:
            needs = sum(p.default is p.empty for p in parameters)
            if swapped or needs < 3 or needs != 1 + len(free):
                return None
            return Arguments((None, *free))
    leading = next((place for place in range(len(parameters)) if place not in found), len(parameters))
    positional = tuple(found[place] for place in range(leading))
    later = {parameters[place].name: entry for place, entry in found.items() if place >= leading}
    return Arguments(positional, tuple((name, entry) for name, entry in later.items() if entry is not None))


def needed_arguments(function: Callable) -> list[str]:
    """Return the names of the arguments without a default."""
    return [p.name for p in _parameters(function) if p.default is p.empty]


def _parameters(function: Callable) -> list[inspect.Parameter]:
    """Return the positional parameters, then the keyword-only ones; [] for a function without a signature."""
    try:
        found = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):  # no signature available, as for some built-in functions
        return []
    named = [p for p in found if p.kind is p.KEYWORD_ONLY]
    return [*(p for p in found if p.kind in _POSITIONAL), *named]


def _swapped(names: Sequence[str]) -> bool:
    """Return True if the target comes first: (y_true, y_pred), as in scikit-learn and Keras."""
    return len(names) > 1 and _is(names[0], _NAMES) and _is(names[1], _OUTPUTS)


def _is(name: str, known: Collection[str]) -> bool:
    return name.strip("_").lower() in known


def _from_torch(function: Callable) -> bool:
    """Return True for a function or module of torch itself: its `weight` and `pos_weight` are not batch entries."""
    return (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0] == "torch"
