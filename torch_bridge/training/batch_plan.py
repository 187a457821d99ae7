"""Decide which batch entries a module takes, and which one is the target."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from torch_bridge.call_forms import TARGETS, Arguments

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class BatchView(dict):
    """The batch that a loss function gets: `batch["labels"]`, and `batch[1]` for a dataset of tuples."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(str(key) if isinstance(key, int) else key)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to call a module on a batch.

    positional, named: batch entries that the module is called with. target: the entry that a loss module compares with,
    or None; if the module takes it by name too, it is left out when only outputs are wanted. whole: entries of the one
    argument of `forward(self, batch)`, a dict or, for a dataset of tuples, a list; empty for other forms. compares:
    arguments of the loss besides the output; None: the whole batch. asks: forward requires the target, so that it is
    passed for outputs too. spread: the positional entry is a tuple or a dict of the arguments.
    """

    positional: tuple[str, ...]
    named: tuple[str, ...]
    target: str | None
    whole: tuple[str, ...] = ()
    compares: Arguments | None = None
    asks: bool = False
    spread: bool = False

    @classmethod
    def of_pair(cls, module: torch.nn.Module, batch: Mapping[str, Any]) -> "Plan | None":
        """Return the plan for a dataset of (arguments, target) if the arguments are a tuple or dict that fits forward,
        else None."""
        if list(batch) != ["0", "1"]:
            return None
        given, parameters = batch["0"], inspect.signature(module.forward).parameters
        required = [p.name for p in parameters.values() if p.default is p.empty and p.kind in _NAMED]
        if isinstance(given, Mapping):
            fits = {*required} <= {*given} <= {*parameters}
        else:
            several = isinstance(given, (tuple, list)) and len(given) > 1
            fits = several and (len(given) == len(required) or list(parameters) == [_rest(parameters)])
        return cls(("0",), (), "1", spread=True) if fits else None

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        keys: Sequence[str],
        inputs: Sequence[str] | None,
        target: str | None,
        own_loss: bool = False,
    ) -> "Plan":
        """Derive the plan from forward's signature. keys: the batch's entries, without valid and index. own_loss: the
        module computes its loss, so it gets all entries that it has arguments for. Raises UserError if signature and
        entries do not fit."""
        parameters = inspect.signature(module.forward).parameters
        for key in [*(inputs or ()), *([target] if target else ())]:
            if key not in keys:
                raise UserError(f"the batch has no entry {key!r}; it has {', '.join(keys)}")
        known = [key for key in keys if key in parameters and parameters[key].kind in _NAMED]
        if target is None:
            target = next((key for key in TARGETS if key in keys), None)
        if inputs is not None:
            positional, named = [key for key in inputs if key not in parameters], [k for k in inputs if k in parameters]
        elif [key for key in known if key != target]:
            positional, named = [], known
        elif _is_tuple(keys):
            positional, named = _leading(parameters, keys, own_loss), []
        elif not _positional(parameters) and _takes(parameters, inspect.Parameter.VAR_KEYWORD):
            positional, named = [], list(keys)
        else:
            positional, named = list(keys[:1]), [key for key in known if key not in keys[:1]]
        if target is None:
            rest = [key for key in keys if key not in positional and key not in named]
            target = rest[0] if len(rest) == 1 else None
        _check(module, parameters, positional, named, keys)
        taken = parameters.get(target) if target in named else None  # None too if **kwargs takes it
        asks = taken is not None and taken.default is inspect.Parameter.empty
        return cls(tuple(positional), tuple(named), target, asks=asks)

    @classmethod
    def whole_batch(cls, module: torch.nn.Module, keys: Sequence[str], plan: "Plan") -> "Plan | None":
        """Return the plan of `forward(self, batch)` if the signature allows it and `plan` passes one entry, else
        None."""
        arguments = _positional(inspect.signature(module.forward).parameters)
        if len(arguments) != 1 or len(plan.positional) != 1 or plan.named or (_is_tuple(keys) and len(keys) == 1):
            return None
        return cls((), (), plan.target, tuple(keys))

    def free(self, keys: Sequence[str]) -> list[str]:
        """Return the entries of a dataset of tuples that the module does not take, except the first."""
        taken = {*keys[:1], *self.positional, *self.named}
        return [key for key in keys if key not in taken] if _is_tuple(keys) else []

    def call(self, module: torch.nn.Module, batch: dict[str, Any], with_target: bool = True) -> Any:
        """Call the module, torch or converted, on its entries of the batch, torch tensors or arrays."""
        if self.whole:
            entries = {key: batch[key] for key in self.whole}
            return module(list(entries.values()) if _is_tuple(self.whole) else entries)
        if self.spread:
            given = batch[self.positional[0]]
            return module(**given) if isinstance(given, Mapping) else module(*given)
        named = {key: batch[key] for key in self.named if with_target or self.asks or key != self.target}
        return module(*(batch[key] for key in self.positional), **named)

    def shown(self, module: torch.nn.Module) -> str:
        """Return the call as a user would write it."""
        entry = lambda key: f"batch[{key}]" if key.isdigit() else f"batch[{key!r}]"
        stars = "*" if self.spread else ""
        arguments = [*(stars + entry(key) for key in self.positional), *(f"{key}={entry(key)}" for key in self.named)]
        return f"{type(module).__name__}()({', '.join(arguments) or 'batch'})"


def _is_tuple(keys: Sequence[str]) -> bool:
    """Return True for the entries of a dataset of tuples."""
    return list(keys) == [str(place) for place in range(len(keys))]


def _positional(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _rest(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the name of the `*args` parameter, or None."""
    return next((name for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), None)


def _takes(parameters: Mapping[str, inspect.Parameter], kind: Any) -> bool:
    return any(p.kind is kind for p in parameters.values())


def _leading(parameters: Mapping[str, inspect.Parameter], keys: Sequence[str], own_loss: bool) -> list[str]:
    """Return the first entries of a tuple: as many as forward requires, or all that it accepts if it computes the
    loss."""
    arguments = _positional(parameters)
    required = sum(p.default is p.empty for p in arguments)
    if _takes(parameters, inspect.Parameter.VAR_POSITIONAL):
        count = len(keys) if own_loss else max(required, len(keys) - 1)
    else:
        count = len(arguments) if own_loss else required
    return list(keys[: max(count, 1)])


def _check(module, parameters, positional, named, keys) -> None:
    free = _positional(parameters)
    taken = {p.name for p in free[: len(positional)]} | set(named)
    wanting = [p.name for p in parameters.values() if p.default is p.empty and p.kind in _NAMED and p.name not in taken]
    if wanting:
        raise UserError(
            f"{type(module).__name__}.forward needs {', '.join(wanting)}; the batch has {', '.join(keys)}. Name the "
            "Dataset's entries after the arguments, or list them in model.inputs"
        )
