"""Convert optax's moments and count to the state_dict of torch.optim's AdamW, Adam and SGD, and back.

torch numbers parameters through the groups in order and stores no names (except `param_names`, torch >= 2.6); optax
uses dicts by key. Needs numpy only, no torch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from torch_bridge.state_dict import leaf_of, place, without_wrappers

MOMENTS = {"adamw": ("mu", "nu"), "adam": ("mu", "nu"), "sgd": ("trace",)}  # optax's fields, by optimizer name
TORCH_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
TORCH_CLASSES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
COMPARED = ("betas", "eps", "weight_decay", "momentum", "nesterov")  # options of both torch and the run
ASSUMED = "the file's optimizer does not name its parameters: taken"
REFUSED = {"amsgrad": False, "maximize": False, "dampening": 0}  # only torch has these; with their harmless value


@dataclasses.dataclass(frozen=True)
class Group:
    """A torch parameter group: its name, its options as torch spells them, its parameters in torch's order."""

    name: str
    options: Mapping[str, Any]
    keys: Sequence[str]


def to_torch(name: str, opt_state: Any, groups: Sequence[Group], count: int) -> dict[str, Any]:
    """Return the state_dict of `torch.optim.AdamW`, `Adam` or `SGD`, with LazyArrays in place of tensors.

    name: the optimizer's name in the config. opt_state: optax's, dicts by key. count: updates made.
    Raises UserError for an optimizer that torch.optim does not have.
    """
    moments = _moments(name)
    state, param_groups, number = {}, [], 0
    for group in groups:
        numbers = range(number, number + len(group.keys))
        number += len(group.keys)
        if count:
            state |= {i: _entry(opt_state, key, moments, count) for i, key in zip(numbers, group.keys, strict=True)}
        names = {"param_names": list(group.keys), "name": group.name}
        param_groups.append({**group.options, **names, "params": list(numbers)})
    return {"state": state, "param_groups": param_groups}


def _entry(opt_state: Any, key: str, moments: Sequence[str], count: int) -> dict[str, Any]:
    arrays = {
        TORCH_NAMES[field]: leaf_of(getattr(opt_state, field)[key]) for field in moments if field in _fields(opt_state)
    }
    return ({} if moments == ("trace",) else {"step": np.array(count, np.float32)}) | arrays


def from_torch(
    name: str,
    saved: Mapping[str, Any],
    like: Any,
    groups: Sequence[Group],
    order: Sequence[str],
    source: str = "the file",
) -> tuple[Any, int | None, list[str]]:
    """Convert torch's state to optax's, in the layout of `like`. Return it, the number of updates made (None for SGD,
    which has no count), and notes: one per option that differs from the run's, or assumption made.

    order: all parameters of the model in the order of `torch.nn.Module.parameters()`, trained or not.
    Raises UserError if the state belongs to another optimizer, or to other parameters.
    """
    moments = tuple(field for field in _moments(name) if field in _fields(like))
    shapes = _shapes(name, like)
    saved, assumed = with_names(name, saved, like, groups, order, source)
    keys = _by_number(saved, order)
    entries = {keys[number]: entry for number, entry in saved["state"].items() if keys.get(number) in shapes}
    left = [
        keys.get(number, number)
        for number, entry in saved["state"].items()
        if keys.get(number) not in shapes and _arrays(entry)
    ]
    if left and not moments:
        raise UserError(
            f"{source}: its optimizer holds momentum of {len(left)} parameters ({left[0]}, ...), and optim.momentum is "
            "0 here: set it, or take the weights alone: init_optimizer=false"
        )
    _check_kind(name, saved, entries or {f"parameter {n}": entry for n, entry in saved["state"].items()}, source)
    steps = {key: round(float(np.asarray(entry["step"]))) for key, entry in entries.items() if "step" in entry}
    count = max(steps.values(), default=None)
    notes = [*assumed, *_differences(saved["param_groups"], groups)]
    late = [key for key, step in steps.items() if step != count]
    late += [key for key in shapes if key not in entries and entries]
    if late:
        notes.append(
            f"{len(late)} parameters have seen fewer updates than the others ({late[0]}, ...): counted alike here"
        )
    fields: dict[str, Any] = {field: _field(field, entries, getattr(like, field)) for field in moments}
    if "count" in _fields(like):
        fields["count"] = place(np.asarray(count or 0, np.int32), like.count)
    return (like._replace(**fields) if fields else like), count, notes


def _shapes(name: str, like: Any) -> dict[str, tuple]:
    """Return the shapes of the moments, by parameter."""
    moments = [field for field in _moments(name) if field in _fields(like)]
    return {key: tuple(value.shape) for field in moments for key, value in getattr(like, field).items()}


def _arrays(entry: Mapping[str, Any]) -> list[str]:
    """Return the names of the moments in torch's state of one parameter."""
    return [name for name, value in entry.items() if name in TORCH_NAMES.values() and value is not None]


def _fields(opt_state: Any) -> tuple[str, ...]:
    return getattr(opt_state, "_fields", ())


def _field(field: str, entries: Mapping[str, Mapping], like: Mapping[str, Any]) -> dict[str, Any]:
    """Place one moment of every parameter; zeros for a parameter without a gradient so far, which has no entry in
    torch."""
    placed = {}
    for key, old in like.items():
        value = entries.get(key, {}).get(TORCH_NAMES[field])
        placed[key] = place(np.zeros(old.shape, np.float32) if value is None else value, old)
    return placed


def _moments(name: str) -> tuple[str, ...]:
    if name not in MOMENTS:
        raise UserError(
            f"optim.name: torch.optim has no optimizer with the state of {name}, only of {', '.join(MOMENTS)}; take "
            "the weights alone (export without --optimizer, init_optimizer=false)"
        )
    return MOMENTS[name]


def with_names(
    name: str, saved: Mapping[str, Any], like: Any, groups: Sequence[Group], order: Sequence[str], source: str
) -> tuple[dict[str, Any], list[str]]:
    """Add `param_names` to all groups of a state; also return notes if the parameters' order had to be assumed. States
    of torch.distributed.checkpoint, whose keys are names, are accepted.

    Arguments as `from_torch`. For groups without names, the usual choices and orders of parameters are tried against
    the moments' shapes and the groups' options. Raises UserError if these do not decide.
    """
    shapes, saved = _shapes(name, like), _numbered(saved, source)
    saved_groups = saved["param_groups"]
    sizes = [len(group["params"]) for group in saved_groups]
    if all(len(group.get("param_names", ())) == size for group, size in zip(saved_groups, sizes, strict=True)):
        keys = _by_number(saved, order)
        unknown = [key for number, key in keys.items() if saved["state"].get(number) and key not in order]
        if unknown:
            raise UserError(
                f"{source}: its optimizer holds a state of {unknown[0]}, which is no parameter of this model "
                f"({len(unknown)} such names). Take the weights alone: init_optimizer=false"
            )
        return saved, []
    if not shapes or not any(map(_arrays, saved["state"].values())):
        return saved, []  # no moments that could be assigned to a wrong parameter
    members, assumed = _members(saved, groups, order, shapes, source)
    named = [{**group, "param_names": names} for group, names in zip(saved_groups, members, strict=True)]
    return {**saved, "param_groups": named}, assumed


def _numbered(saved: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Replace parameter names in a state by numbers, and put the names in `param_names`. Raises UserError for groups
    that no torch optimizer writes."""
    for number, group in enumerate(saved["param_groups"]):
        lacking = [key for key in ("params", "lr") if not isinstance(group, Mapping) or key not in group]
        if lacking:
            raise UserError(
                f"{source}: group {number} of its optimizer has no {' and no '.join(lacking)}, wanted what "
                "optimizer.state_dict() gives. Take the weights alone: init_optimizer=false"
            )
    listed = [key for group in saved["param_groups"] for key in group["params"]]
    if not listed or not all(isinstance(key, str) for key in listed):
        return dict(saved)
    numbers = {key: number for number, key in enumerate(listed)}
    groups = [
        {**group, "params": [numbers[key] for key in group["params"]], "param_names": list(group["params"])}
        for group in saved["param_groups"]
    ]
    return {**saved, "state": {numbers[key]: entry for key, entry in saved["state"].items()}, "param_groups": groups}


def _by_number(saved: Mapping[str, Any], order: Sequence[str]) -> dict[int, str]:
    """Map each of torch's parameter numbers to the parameter's name, by the groups' `param_names`."""
    names = {
        number: name
        for group in saved["param_groups"]
        for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    own = without_wrappers({name: name for name in names.values()}, dict.fromkeys(order))
    keys = {name: key for key, name in own.items()}
    return {number: keys.get(name) or name for number, name in names.items()}


def _members(
    saved: Mapping, groups: Sequence[Group], order: Sequence[str], shapes: Mapping[str, tuple], source: str
) -> tuple[list[list[str]], list[str]]:
    """Return the parameter names of every saved group that has none, and a note on what was assumed."""
    saved_groups = saved["param_groups"]
    fits = lambda group, keys: _fits(saved["state"], group["params"], keys, shapes)
    by_name = {group.name: list(group.keys) for group in groups}
    if all(group.get("name") in by_name for group in saved_groups):
        members = [by_name[group["name"]] for group in saved_groups]
        if all(map(fits, saved_groups, members)):
            return members, []
    trained = [key for key in order if key in shapes]
    for keys in (trained, list(order)) if len(saved_groups) == 1 else ():
        if fits(saved_groups[0], keys):
            return [keys], [f"{ASSUMED} in the order of model.parameters()"]
    possible = [[i for i, ours in enumerate(groups) if fits(group, ours.keys)] for group in saved_groups]
    alike = [
        [i for i in numbers if not _unlike(group, groups[i])]
        for group, numbers in zip(saved_groups, possible, strict=True)
    ]
    found = _pairings(possible) if len(saved_groups) == len(groups) else []
    if len(found) > 1:
        found = _pairings(alike) or found
    if len(found) == 1:
        members = [list(groups[i].keys) for i in found[0]]
        told = ", ".join(groups[i].name for i in found[0])
        return members, [f"{ASSUMED} as the groups {told}, each in the order of model.parameters()"]
    sizes = [len(group["params"]) for group in saved_groups]
    ours = ", ".join(f"{group.name} {len(group.keys)}" for group in groups)
    raise UserError(
        f"{source}: its optimizer's groups of {sizes} parameters are none that this run can tell apart: it trains "
        f"{len(trained)} of {len(order)} parameters (groups: {ours}). Save it with names, from "
        "torch.optim.AdamW(model.named_parameters()), or take the weights alone: init_optimizer=false"
    )


def _pairings(possible: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return up to two ways to assign each place a different one of its possible numbers."""
    found: list[dict[int, int]] = []
    places = sorted(range(len(possible)), key=lambda place: len(possible[place]))

    def extend(chosen: dict[int, int]) -> None:
        if len(chosen) == len(places):
            found.append(chosen)
            return
        place = places[len(chosen)]
        for number in possible[place]:
            if len(found) < 2 and number not in chosen.values():
                extend({**chosen, place: number})

    extend({})
    return [[chosen[place] for place in range(len(possible))] for chosen in found]


def _fits(state: Mapping, numbers: Sequence[int], keys: Sequence[str], shapes: Mapping[str, tuple]) -> bool:
    """Return True if the states of these numbers may belong to the parameters `keys`, by their shapes."""
    pairs = [(state.get(number, {}), key) for number, key in zip(numbers, keys, strict=False)]
    same = lambda entry, key: all(tuple(entry[name].shape) == shapes.get(key) for name in _arrays(entry))
    return len(numbers) == len(keys) and all(key not in shapes or same(entry, key) for entry, key in pairs)


def _check_kind(name: str, saved: Mapping, entries: Mapping[str, Mapping], source: str) -> None:
    wanted = {TORCH_NAMES[field] for field in MOMENTS[name]}
    for key, entry in entries.items():
        held = set(entry) - {"step"}
        if not held <= wanted or (name != "sgd" and held != wanted):
            raise UserError(
                f"{source}: the optimizer state of {key} holds {', '.join(sorted(held)) or 'nothing'}; "
                f"optim.name={name} wants {', '.join(sorted(wanted))}. Set optim.name to the optimizer it was saved "
                "from, or init_optimizer=false"
            )
    for group in saved["param_groups"]:
        for option, harmless in REFUSED.items():
            if group.get(option, harmless) != harmless:
                raise UserError(
                    f"{source}: its optimizer was made with {option}={group[option]}, which is not offered here"
                )


def _differences(saved_groups: Sequence[Mapping], groups: Sequence[Group]) -> list[str]:
    return [
        f"optimizer group {ours.name}: {option} is {theirs} in the file, {wanted} here"
        for number, saved in enumerate(saved_groups)
        if (ours := _group_of(saved, number, groups)) is not None
        for option, theirs, wanted in _unlike(saved, ours)
    ]


def _unlike(saved: Mapping[str, Any], ours: Group) -> list[tuple[str, Any, Any]]:
    """Return the options of a saved group that differ from the run's: (name, saved value, the run's value)."""
    pairs = [
        (option, saved[option], ours.options[option])
        for option in COMPARED
        if option in saved and option in ours.options
    ]
    pairs.append(("lr", saved.get("initial_lr", saved["lr"]), ours.options["initial_lr"]))
    return [pair for pair in pairs if not np.allclose(pair[1], pair[2], rtol=1e-6, atol=0)]


def group_options(name: str, lr: float, initial_lr: float, weight_decay: float, betas, eps, momentum, nesterov) -> dict:
    """Return all options that torch's optimizer keeps in a group besides its parameters."""
    shared = {
        "lr": lr,
        "initial_lr": initial_lr,
        "weight_decay": weight_decay,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    }
    if name == "sgd":
        return shared | {"momentum": momentum, "dampening": 0, "nesterov": nesterov}
    adam = {"betas": tuple(betas), "eps": eps, "amsgrad": False, "capturable": False}
    return shared | adam | {"decoupled_weight_decay": name == "adamw"}


def to_lambda_lr(base: Sequence[float], current: Sequence[float], updates: int) -> dict[str, Any]:
    """Return the state of `torch.optim.lr_scheduler.LambdaLR` after `updates` steps; similar schedulers accept it too.

    base, current: learning rate of each group at its peak and now.
    """
    return {
        "base_lrs": list(base),
        "last_epoch": updates,
        "_step_count": updates + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": list(current),
        "lr_lambdas": [None] * len(base),
    }


def to_plateau(plateau: Mapping[str, Any], options: Mapping[str, Any], evaluations: int) -> dict[str, Any]:
    """Return a ReduceLROnPlateau state. plateau: lr, best (None before the first evaluation), bad epochs."""
    worst = math.inf if options["mode"] == "min" else -math.inf
    return {
        **options,
        "cooldown": 0,
        "cooldown_counter": 0,
        "threshold_mode": "rel",
        "best": worst if plateau["best"] is None else plateau["best"],
        "num_bad_epochs": plateau["bad"],
        "last_epoch": evaluations,
        "_last_lr": [plateau["lr"]],
    }


def from_plateau(
    scheduler: Mapping[str, Any], optimizer: Mapping[str, Any], groups: Sequence[Group], peak: float, source: str
) -> dict[str, Any] | None:
    """Return lr, best and bad of a ReduceLROnPlateau's state; None for another scheduler's.

    lr: `peak` times the factor by which all groups' rates have fallen. If the state has no `_last_lr`, the rates are
    read from the optimizer's groups. Raises UserError if the groups' factors differ: a run has a single one.
    """
    if "num_bad_epochs" not in scheduler:
        return None
    best = scheduler["best"]
    best = best if isinstance(best, (int, float)) else float(np.asarray(best))
    saved = optimizer["param_groups"]
    now = scheduler.get("_last_lr") or [group["lr"] for group in saved]
    now = [float(np.asarray(rate)) for rate in now]
    begun = [_group_of(group, number, groups) for number, group in enumerate(saved[: len(now)])]
    if len(groups) == 1 or any(group is None for group in begun):
        factors = [rate / peak for rate in now] if peak else [1.0]
    else:
        peaks = [group.options["initial_lr"] for group in begun]
        factors = [rate / first for rate, first in zip(now, peaks, strict=False) if first] or [1.0]
    if not np.allclose(factors, factors[0], rtol=1e-3, atol=0):
        raise UserError(
            f"{source}: its plateau scheduler left the groups at the rates {now}, this run's begin at "
            f"{[group.options['initial_lr'] for group in groups]}: they have fallen by different factors, and a run "
            "lowers all groups by one. Set optim.lr and optim.groups to the rates that the file's groups began with, "
            "or take its weights alone: init_optimizer=false"
        )
    return {"lr": peak * factors[0], "best": best, "bad": scheduler["num_bad_epochs"]}


def _group_of(saved: Mapping[str, Any], number: int, groups: Sequence[Group]) -> Group | None:
    """Find the run's group for a saved one: by the names of its parameters, its own name, or its position."""
    names = list(saved.get("param_names") or ())
    if names:
        known = {key: group for group in groups for key in group.keys}
        return known.get(next(iter(without_wrappers(dict.fromkeys(names[:1]), known))))
    named = {group.name: group for group in groups}
    return named.get(saved.get("name", ""), groups[number] if number < len(groups) else None)


def to_scaler(scale: Mapping[str, Any], growth_interval: int) -> dict[str, Any]:
    """Return the state of torch's GradScaler. scale: value, good_steps."""
    return {
        "scale": float(np.asarray(scale["value"])),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": growth_interval,
        "_growth_tracker": int(np.asarray(scale["good_steps"])),
    }


def from_scaler(scaler: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    given = {"value": scaler["scale"], "good_steps": scaler.get("_growth_tracker", 0)}
    return {key: place(np.asarray(value, like[key].dtype), like[key]) for key, value in given.items()}
