"""Read torch.optim optimizers as data (groups, options, state by parameter name) and write state back into them.

The update rules themselves are in `jaxtrain.optim.torch_rules`.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import NoCounterpart, UserError
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.exchange import to_host
from torch_bridge.lazy_array import to_host as whole

REFUSED = {
    "SparseAdam": "it wants sparse gradients, which JAX does not have",
}
OWN_UPDATE = {
    "LBFGS": "it evaluates the loss several times per step; in a loop of jaxtrain.compile torch steps it",
    "Adafactor": "its update depends on the size of the parameter's own tensor; use optim.name=adafactor of a Trainer",
}
PER_STEP = ("differentiable",)
ASKED_AGAIN = 3  # first steps of a scheduler that are compared between two copies


def rule_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the torch.optim class whose rule applies: the object's own, or the one whose `step` it
    inherits.

    For a class from elsewhere, return its own name; the caller compares it with the rule of that name before using
    that.
    Raises NoCounterpart with the reason for an optimizer whose step follows no rule here, and UserError for one that
    needs other input than dense gradients.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise NoCounterpart(f"optimizer: {kind.__name__} is no torch.optim.Optimizer; {_ADVICE}")
    if own_step(optimizer):
        raise NoCounterpart(f"optimizer: {own_step(optimizer)}; {_ADVICE}")
    for base in kind.__mro__:
        own = vars(torch.optim).get(base.__name__)
        if own is base and base is not torch.optim.Optimizer:
            if _plain_step(kind) is not _plain_step(base):
                raise NoCounterpart(f"optimizer: {kind.__name__} overrides step() of {base.__name__}; {_ADVICE}")
            if base.__name__ in OWN_UPDATE:
                raise NoCounterpart(f"optimizer: {base.__name__} has no counterpart: {OWN_UPDATE[base.__name__]}")
            if base.__name__ in REFUSED:
                raise UserError(f"optimizer: {base.__name__} has no counterpart: {REFUSED[base.__name__]}")
            return base.__name__
    return kind.__name__


_ADVICE = (
    "give an optimizer of torch.optim or an optax GradientTransformation, or write the loop with jaxtrain.compile, "
    "where torch steps it"
)


def _plain_step(kind: type) -> Any:
    """Return step() without the profiling wrapper of torch.optim.Optimizer."""
    step = kind.step
    return getattr(step, "__wrapped__", step)


def _is_replaced(kind: type) -> bool:
    """Return True if other code than torch's is the step() of a class of torch.optim, for all its objects."""
    owner = next(base for base in kind.__mro__ if "step" in vars(base))
    code = getattr(inspect.unwrap(vars(owner)["step"]), "__globals__", {}).get("__name__", "")
    return owner.__module__.startswith("torch.optim.") and not code.startswith("torch.optim.")


def own_step(optimizer: torch.optim.Optimizer) -> str:
    """Describe a user's change to this object's step(): a replaced function or hooks. Return "" if there is none."""
    kind, own = type(optimizer).__name__, vars(optimizer).get("step")
    if own is not None and getattr(own, "_wrapped_by_lr_sched", None) is not True or _is_replaced(type(optimizer)):
        return f"the step() of this {kind} was replaced"
    hooks = [
        hook
        for moment in ("pre", "post")
        for hook in getattr(optimizer, f"_optimizer_step_{moment}_hooks", {}).values()
        if not getattr(hook, "of_a_compiled_step", False)
    ]
    return f"hooks are registered on the step() of this {kind}" if hooks else ""


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if step() is one of torch.optim's own."""
    return _plain_step(type(optimizer)).__module__.startswith("torch.optim.")


def parameter_names(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters, in the optimizer's order.

    known: id of a parameter -> its name. Raises UserError if the optimizer holds a parameter that is not in `known`.
    """
    names = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if id(p) not in known]
        if strange:
            raise UserError(
                f"optimizer: {len(strange)} of the {len(group['params'])} parameters of group {number} are not the "
                f"module's (the first has shape {tuple(strange[0].shape)}); build the optimizer from "
                "module.parameters(), after .to() and any replacement of layers. A criterion or head with parameters "
                "of its own goes into the module (self.criterion = criterion), or beside it into "
                "jaxtrain.compile_many({'net': net, 'criterion': criterion}, ...)"
            )
        names.append([known[id(p)] for p in group["params"]])
    return names


def requiring_grad(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> tuple[str, ...]:
    """Return the names of the optimizer's parameters that currently require a gradient."""
    groups = zip(optimizer.param_groups, names, strict=True)
    return tuple(key for group, keys in groups for p, key in zip(group["params"], keys, strict=True) if p.requires_grad)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each group's options without its parameters; tensors as numbers. Raises UserError for `differentiable`."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: _number(value) for key, value in group.items() if key != "params"}
        for name in PER_STEP:
            if options.get(name):
                raise UserError(f"optimizer: {name}=True has no counterpart here; leave it out")
        groups.append(options)
    return groups


def options_ahead(optimizer: torch.optim.Optimizer, scheduler: Any, rows: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the options of every group now and after each `scheduler.step()`, `rows` times in all.

    Copies with parameters of one element are stepped; the objects themselves do not change. scheduler: may be None,
    which yields the present options only. Raises UserError if the scheduler cannot be copied, ends early, or gives
    different numbers in two copies.
    """
    if scheduler is None:
        yield options_of(optimizer)
        return
    kept = {id(p): torch.nn.Parameter(torch.zeros(1)) for group in optimizer.param_groups for p in group["params"]}
    memo: dict[int, Any] = dict(kept)
    for entries in optimizer.state.values():  # shared, not copied: a scheduler does not read it
        memo |= {id(value): value for value in entries.values() if isinstance(value, torch.Tensor)}
    try:
        first, again = (copy.deepcopy((optimizer, scheduler), dict(memo)) for _ in range(2))
    except Exception as error:
        raise UserError(
            f"scheduler: {type(scheduler).__name__} cannot be copied to read its rates ahead ({type(error).__name__}: "
            f"{error})"
        ) from error
    yield options_of(optimizer)
    for row in range(1, rows):
        for copied in (first, again)[: 1 + (row <= ASKED_AGAIN)]:
            step_scheduler(*copied, 1, f"the run takes {rows} of its steps; it ends at {row}")
        options = options_of(first[0])
        if row <= ASKED_AGAIN and options != options_of(again[0]):
            raise UserError(
                f"scheduler: two copies of this {type(scheduler).__name__} give different numbers at step {row}: its "
                "function draws them or counts its calls, and the run asks ahead; let them follow from its argument"
            )
        yield options


def check_scheduler(scheduler: Any, optimizers: Sequence[Any]) -> None:
    """Raise UserError unless it is None or a torch lr_scheduler of one of these optimizers that needs no metric."""
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UserError(
            "scheduler: ReduceLROnPlateau wants a metric; leave it out here and call scheduler.step(metric) yourself, "
            "the step reads the rates that it sets"
        )
    if not any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in optimizers):
        raise UserError(
            f"scheduler: {type(scheduler).__name__}, wanted a torch lr_scheduler that was made for this very optimizer"
        )


def step_scheduler(optimizer: torch.optim.Optimizer, scheduler: Any, times: int, why: str = "") -> None:
    """Call `scheduler.step()` `times` times, as after updates by torch. Raises UserError if it raises."""
    optimizer._opt_called = True  # suppresses the scheduler's warning about a missing optimizer step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(times):
                scheduler.step()
        except Exception as error:
            raise UserError(f"scheduler: {type(scheduler).__name__}.step() raised: {error} {why}".rstrip()) from error


def trained_names(module: torch.nn.Module, loss: Any = None) -> dict[str, int]:
    """Map every name of every parameter to the parameter's id; those of a loss module are named `loss.<name>`."""
    named = module.named_parameters(remove_duplicate=False)
    found = {name: id(parameter) for name, parameter in named}
    if isinstance(loss, torch.nn.Module):
        found |= {f"loss.{name}": id(p) for name, p in loss.named_parameters(remove_duplicate=False)}
    return found


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else to_numpy(value)
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else value


def state_of(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> dict[str, dict[str, np.ndarray]]:
    """Return the optimizer state by parameter name, for all parameters that have one."""
    found = {}
    for group, keys in zip(optimizer.param_groups, names, strict=True):
        for parameter, key in zip(group["params"], keys, strict=True):
            entries = optimizer.state.get(parameter)
            if entries:
                found[key] = {
                    name: np.asarray(to_numpy(value) if isinstance(value, torch.Tensor) else value)
                    for name, value in entries.items()
                    if value is not None
                }
    return found


def write_state(
    optimizer: torch.optim.Optimizer,
    parameters: list[list[torch.Tensor]],
    names: list[list[str]],
    state: Mapping[str, Mapping[str, Any]],
    place: Callable[[torch.Tensor, str], dict[str, Any]] | None = None,
) -> None:
    """Write state into the optimizer, in place for existing tensors, in the form that its own step() would create.

    place: (parameter, name of a state entry) -> the dict that holds it, if not all are in the optimizer.
    """
    state = to_host(dict(state))
    with torch.no_grad():
        for group, keys in zip(parameters, names, strict=True):
            for parameter, key in zip(group, keys, strict=True):
                for name, value in sorted(state.get(key, {}).items(), key=_after_the_count):
                    entries = place(parameter, name) if place else optimizer.state[parameter]
                    _write_entry(entries, name, to_torch(whole(value)), parameter)


def create_state(
    optimizer: torch.optim.Optimizer,
    parameters: list[list[torch.Tensor]],
    names: list[list[str]],
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Create the entries that the optimizer lacks: counts with their values, moments as zeros, whose memory the system
    provides once it is written to."""
    for group, keys in zip(parameters, names, strict=True):
        for parameter, key in zip(group, keys, strict=True):
            entries = optimizer.state[parameter] if key in state else {}
            for name, value in sorted(state.get(key, {}).items(), key=_after_the_count):
                if name in entries:
                    continue
                if value.ndim:
                    entries[name] = torch.zeros(value.shape, dtype=parameter.dtype, device=parameter.device)
                else:
                    _write_entry(entries, name, to_torch(whole(value)), parameter)


def _after_the_count(entry: tuple[str, Any]) -> bool:
    """Return False for the step count and True for moments: a sort key that puts the count first, as torch's optimizers
    do."""
    return entry[0] != "step"


def _write_entry(entries: dict[str, Any], name: str, new: torch.Tensor, parameter: torch.Tensor) -> None:
    old = entries.get(name)
    if isinstance(old, torch.Tensor) and old.shape == new.shape:
        old.copy_(new)
    elif isinstance(old, (int, float)):
        entries[name] = type(old)(new.item())
    else:
        device = parameter.device if new.dim() else torch.device("cpu")
        entries[name] = new.to(device=device, dtype=parameter.dtype if new.dim() else torch.float32)


Arrays = list[np.ndarray]


def probe(optimizer: torch.optim.Optimizer, steps: int = 3) -> tuple[dict[str, Any], Arrays, Arrays]:
    """Run a few steps of this optimizer's own code on a small parameter, to compare a rule with.

    Returns the options of the first group, the gradients used, and the parameter before the first and after each step.
    """
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, generator=generator))
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    try:
        kind: Any = type(optimizer)
        twin = kind([{"params": [parameter], **copy.deepcopy(options)}])
    except Exception as error:
        raise UserError(
            f"optimizer: {type(optimizer).__name__} cannot be built on a parameter of its own to compare its rule "
            f"({type(error).__name__}: {error}); {_ADVICE}"
        ) from error
    grads, values = [], [parameter.detach().clone().numpy()]
    for _ in range(steps):
        parameter.grad = torch.randn(5, generator=generator)
        grads.append(parameter.grad.clone().numpy())
        twin.step()
        values.append(parameter.detach().clone().numpy())
    group = {key: _number(value) for key, value in twin.param_groups[0].items() if key != "params"}
    return group, grads, values
