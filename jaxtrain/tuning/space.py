"""The YAML file of a search: the settings that vary, and the options of the study.

study: {trials: 20, pruner: {name: median}}
optim.lr: {type: loguniform, low: 1.0e-5, high: 1.0e-2}
optim.schedule.warmup_ratio: {type: uniform, low: 0.0, high: 0.2, when: {optim.schedule.name: [linear, cosine]}}
"""

import difflib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from jaxtrain import config_io
from jaxtrain.config import FLAT_NAMES, Section
from jaxtrain.errors import UserError

Values = dict[str, Any]


class Sampler(Section):
    name: Literal["tpe", "random", "grid"] = "tpe"  # grid: every combination of categorical choices
    startup_trials: int = Field(default=10, ge=1)  # tpe: drawn at random before the model of the results is used


class Pruner(Section):
    """Options of the pruner; counts of evaluations are per trial."""

    name: Literal["none", "median", "asha", "hyperband"] = "median"
    startup_trials: int = Field(default=5, ge=0)  # median: finished trials before any is pruned
    warmup_evaluations: int = Field(default=2, ge=0)  # median: of each trial, before it is judged
    min_evaluations: int = Field(default=1, ge=1)  # asha, hyperband: before the first rung
    reduction_factor: int = Field(default=3, ge=2)  # asha, hyperband: one of so many trials continues


class StudySettings(Section):
    trials: int = Field(default=20, ge=1)
    timeout_s: float | None = Field(default=None, gt=0)  # start no trial later than this
    seed: int = Field(default=0, ge=0, lt=2**32)  # of the sampler; the trials' own is the config's `seed`
    sampler: Sampler = Sampler()
    pruner: Pruner = Pruner()
    keep_checkpoints: Literal["best", "all"] = "best"  # best: those of other finished trials are deleted


class Setting(Section):
    """How one setting varies.

    when: {other setting: value or list of values} as the condition to vary; otherwise the setting keeps the config's
    value. Settings of the space that `when` names must come earlier in the file.
    """

    type: Literal["uniform", "loguniform", "float", "int", "categorical"]
    low: float | None = None
    high: float | None = None
    step: float | None = Field(default=None, gt=0)
    log: bool = False
    choices: list[Any] | None = None
    when: dict[str, Any] = {}

    @model_validator(mode="after")
    def _complete(self):
        if self.type == "categorical":
            if not self.choices:
                raise ValueError("categorical wants choices: [...]")
        elif self.low is None or self.high is None or self.low > self.high:
            raise ValueError(f"{self.type} wants low <= high")
        elif self.logarithmic and self.low <= 0:
            raise ValueError(f"a logarithmic scale wants low > 0, got {self.low}")
        elif self.logarithmic and self.step is not None:
            raise ValueError("a logarithmic scale has no step")
        elif self.type == "int" and not all(float(end).is_integer() for end in (self.low, self.high, self.step or 1)):
            raise ValueError("int wants whole numbers")
        return self

    @property
    def logarithmic(self) -> bool:
        return self.log or self.type == "loguniform"

    def suggest(self, trial: Any, name: str) -> Any:
        """Let an optuna.Trial choose a value."""
        if self.type == "categorical":
            return trial.suggest_categorical(name, self.choices)
        if self.type == "int":
            low, high = map(int, self._range)
            step = {} if self.logarithmic else {"step": int(self.step or 1)}
            return trial.suggest_int(name, low, high, log=self.logarithmic, **step)
        return trial.suggest_float(name, *self._range, log=self.logarithmic, step=self.step)

    @property
    def ends(self) -> tuple[Any, Any]:
        """The two extreme values (for categorical: the first and the last choice)."""
        if self.choices is not None and self.type == "categorical":
            return self.choices[0], self.choices[-1]
        low, high = self._range
        return (int(low), int(high)) if self.type == "int" else (low, high)

    @property
    def conditions(self) -> list[tuple[str, Any]]:
        """The pairs (other setting, value) of `when`, one for each value."""
        return [(key, value) for key, wanted in self.when.items() for value in _listed(wanted)]

    def check_offers(self, value: Any, where: str) -> None:
        """Raise UserError for a value that this setting never takes."""
        if self.type == "categorical":
            if value not in (self.choices or ()):
                raise UserError(f"{where}: {value!r} is none of its choices, {self.choices}")
        elif not isinstance(value, (int, float)) or not self._range[0] <= value <= self._range[1]:
            raise UserError(f"{where}: {value!r} is not between {self._range[0]} and {self._range[1]}")

    @property
    def _range(self) -> tuple[float, float]:
        assert self.low is not None  # checked by _complete
        assert self.high is not None
        return self.low, self.high


class Space(Section):
    """The search space. settings: by dotted key, in the file's order."""

    study: StudySettings = StudySettings()
    settings: dict[str, Setting]

    @model_validator(mode="after")
    def _in_order(self):
        seen: set[str] = set()
        for name, setting in self.settings.items():
            if empty := [key for key, wanted in setting.when.items() if wanted == []]:
                raise ValueError(f"{name} varies for no value of {', '.join(empty)}; leave out `when`, or the setting")
            late = [key for key in setting.when if key in self.settings and key not in seen]
            if late:
                raise ValueError(f"{name} depends on {', '.join(late)}, which must come before it")
            seen.add(name)
        if self.study.sampler.name == "grid":
            endless = [name for name, setting in self.settings.items() if setting.type != "categorical" or setting.when]
            if endless:
                raise ValueError(f"sampler grid wants categorical settings without `when`; not so {', '.join(endless)}")
        return self

    def needed(self, name: str) -> Values:
        """Return values of earlier settings of the space under which this setting varies."""
        found: Values = {}
        for key, wanted in self.settings[name].when.items():
            if key in self.settings:
                found |= {**self.needed(key), key: _listed(wanted)[0]}
        return found

    def choose(self, pick: Callable[[str, Setting], Any], fixed: Mapping[str, Any]) -> Values:
        """Pick a value for every setting whose condition holds. fixed: the flat config, for settings that do not."""
        chosen: Values = {}
        for name, setting in self.settings.items():
            known = {**fixed, **chosen}
            if all(known.get(key) in _listed(wanted) for key, wanted in setting.when.items()):
                chosen[name] = pick(name, setting)
        return chosen


def load(path: str | pathlib.Path) -> Space:
    """Read the space from a YAML file. Raises UserError that lists every mistake in it."""
    path = pathlib.Path(path)
    values = config_io.read(path)
    study = values.pop("study", {})
    names = [FLAT_NAMES.get(name, name) for name in values]
    if twice := [name for name in values if names.count(FLAT_NAMES.get(name, name)) > 1]:
        raise UserError(f"{path}: {' and '.join(twice)} are one setting; keep one")
    values = dict(zip(names, values.values(), strict=True))
    if own := [name for name in values if name.startswith("run.")]:
        raise UserError(
            f"{path}: {own[0]} cannot vary, as every trial has a name and a folder of its own; leave it out"
        )
    if not values:
        wanted = "optim.lr: {type: loguniform, low: 1e-5, high: 1e-2}"
        raise UserError(f"{path}: no setting varies; wanted lines as {wanted}")
    return config_io.validate(Space, {"study": study, "settings": values}, path)


def apply(values: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested config values with some replaced, by dotted key. Raises UserError for a key inside a value."""
    result = dict(values)
    for key, value in chosen.items():
        *sections, leaf = key.split(".")
        section = result
        for place, name in enumerate(sections, 1):
            inner = section.get(name) or {}
            if not isinstance(inner, Mapping):
                raise UserError(f"{key}: {'.'.join(sections[:place])} is {inner!r}, a setting and no section of some")
            section[name] = dict(inner)
            section = section[name]
        section[leaf] = value
    return result


def check(space: Space, values: Mapping[str, Any], source: str | pathlib.Path) -> None:
    """Raise UserError if the config is invalid with values of the space, before any trial is wasted on it."""
    fixed = config_io.flatten(config_io.check(values, source)[1].model_dump(mode="json"))

    def take(chosen: Values) -> None:
        config_io.check(apply(values, chosen), f"{source} with {', '.join(f'{k}={v}' for k, v in chosen.items())}")

    for end in (0, 1):
        take(space.choose(lambda name, setting, end=end: setting.ends[end], fixed))
    for name, setting in space.settings.items():
        for key, value in setting.conditions:
            where = f"{name}: when {key}"
            if key in space.settings:
                space.settings[key].check_offers(value, where)
            elif key in fixed:
                take({key: value})
            else:
                near = difflib.get_close_matches(key, [*space.settings, *fixed], 1, 0.6)
                hint = f", did you mean `{near[0]}`?" if near else ""
                raise UserError(f"{where}: neither a setting of the space nor one of {source}{hint}")
        needed = space.needed(name)
        for choice in setting.choices or ():
            picked = {**needed, name: choice}
            take(space.choose(lambda one, other, picked=picked: picked.get(one, other.ends[0]), fixed))


def _listed(wanted: Any) -> list:
    return wanted if isinstance(wanted, list) else [wanted]
