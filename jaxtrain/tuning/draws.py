"""Draw the settings of a sweep's runs from its space."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import TrainingConfig
from jaxtrain.config_io import validate
from jaxtrain.errors import UserError
from jaxtrain.tuning.space import Setting

Values = dict[str, Any]


def draw(space: Mapping[str, Any] | Sequence[Mapping[str, Any]], runs: int | None, seed: int) -> list[Values]:
    """Return the settings of every run.

    space: by name a list (or range) of choices, {"type": "loguniform", "low": ..., "high": ...} as in the YAML of a
    search, or a fixed value; or the runs' settings themselves, as a list of mappings. runs: how many to draw; without
    it, or where lists alone have exactly so many combinations, every combination is one run. Fewer are drawn without
    repetition. seed: of the draw. Raises UserError for an empty or malformed space.
    """
    if not isinstance(space, Mapping):
        return _listed(space, runs)
    settings = {name: _setting(name, value) for name, value in space.items()}
    lists = {name: choices for name, choices in settings.items() if isinstance(choices, list)}
    total = math.prod(len(choices) for choices in lists.values())
    if len(lists) == len(settings):
        return _combinations(lists, total, runs, seed)
    if runs is None:
        endless = next(name for name in settings if name not in lists)
        raise UserError(f"runs: wanted, because {endless} has any number of values")
    generator = np.random.default_rng(seed)
    drawn = {
        name: _choices(setting, runs, generator) if isinstance(setting, list) else _numbers(setting, runs, generator)
        for name, setting in settings.items()
    }
    return [{name: values[i] for name, values in drawn.items()} for i in range(runs)]


def _listed(space: Sequence[Mapping[str, Any]], runs: int | None) -> list[Values]:
    found = [dict(values) for values in space]
    if not found or not all(values.keys() == found[0].keys() for values in found):
        raise UserError("space: a list holds one mapping of settings for each run, with the same names")
    if runs not in (None, len(found)):
        raise UserError(f"runs: {runs}, but the space lists {len(found)}; leave runs out")
    return found


def _setting(name: str, value: Any) -> list[Any] | Setting:
    if isinstance(value, Mapping):
        setting = validate(Setting, dict(value), f"space, {name}")
        if setting.when:
            raise UserError(f"space, {name}: `when` is for studies; give the runs as a list of mappings")
        return list(setting.choices or ()) if setting.type == "categorical" else setting
    if isinstance(value, (list, tuple, range)):
        if not len(value):
            raise UserError(f"space, {name}: an empty list; wanted the values to try")
        return list(value)
    return [value]


def _combinations(lists: Mapping[str, list], total: int, runs: int | None, seed: int) -> list[Values]:
    if runs is not None and runs > total:
        raise UserError(
            f"runs: {runs}, but the space has {total} combinations; add `seed: range({-(-runs // total)})` to repeat "
            "each, or leave runs out"
        )
    every = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    if runs is None or runs == total:
        return every
    return [every[i] for i in sorted(np.random.default_rng(seed).permutation(total)[:runs])]


def _choices(choices: list, runs: int, generator: np.random.Generator) -> list:
    """Return each choice equally often, as far as possible, in random order."""
    return [choices[i % len(choices)] for i in generator.permutation(runs)]


def _numbers(setting: Setting, runs: int, generator: np.random.Generator) -> list:
    """Return one number of each of `runs` equal parts of the range, in random order (a Latin hypercube)."""
    low, high = setting.ends
    places = (generator.permutation(runs) + generator.uniform(size=runs)) / runs
    if setting.type == "int":
        low, high = low - 0.5, high + 0.5
    if setting.logarithmic:
        found = np.exp(np.log(max(low, 0.5 if setting.type == "int" else low)) * (1 - places) + np.log(high) * places)
    else:
        found = low + (high - low) * places
    if setting.step is not None:
        found = setting.ends[0] + np.round((found - setting.ends[0]) / setting.step) * setting.step
    found = np.clip(found, *setting.ends)
    return [int(round(value)) for value in found.tolist()] if setting.type == "int" else found.tolist()


def is_setting(name: str) -> bool:
    """Return True if a name is a setting of the config, by its dotted key."""
    section: Any = TrainingConfig
    for part in name.split("."):
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return False
        section = field.annotation
    return True
