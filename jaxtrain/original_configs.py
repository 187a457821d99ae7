"""Configs of the torch projects that the systems replace: recognised by keys, translated, nothing dropped silently."""

import dataclasses
import fnmatch
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import pydantic

from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.task import LegacyConfig, find_task, task_names

SURE = 5  # so many keys that only an original has name it, however many others the file holds


@dataclasses.dataclass(frozen=True)
class Translation:
    """Hold the translation of an original's config.

    settings: nested, this project's. replaced: keys that need no counterpart, with the reason. unknown: keys that
    nothing reads.
    """

    original: str
    settings: dict[str, Any]
    replaced: dict[str, str]
    unknown: list[str]

    def lines(self) -> list[str]:
        """The translation as YAML comments."""
        found = [f"a config of {self.original}; here it is"]
        found += [f"  {key}: {json.dumps(value)}" for key, value in leaves(self.settings)]
        found += [f"{key}: needs no counterpart: {why}" for key, why in self.replaced.items()]
        found += [f"{key}: not translated, nothing here reads it" for key in self.unknown]
        return [f"# {line}" for line in found]


def recognise(values: Mapping[str, Any], task: str | None = None) -> tuple[LegacyConfig, str] | None:
    """Name the original that a config without `task` is of, and a task that replaces it; None where it is of none.

    The whole key set decides: a config of this project that only lacks its `task` holds more keys of the core's
    settings that the original does not have than the other way round. task: decides where the keys are of several.
    Raises UserError that names them where it is not given.
    """
    keys = {key for key, _ in leaves(values)}
    if task is None:
        candidates = originals()
    else:
        own = find_task(task).original
        candidates = {} if own is None else {own.name: (own, task)}
    scores = {name: len(keys & original.keys) for name, (original, _) in candidates.items()}
    top = max(scores.values(), default=0)
    best = [name for name, score in scores.items() if score == top]
    if not top:
        return None
    known = candidates[best[0]][0].keys
    ours = {key for key in keys if is_setting(TrainingConfig, key)}
    theirs, own_alone = (keys & known) - ours, ours - known
    if len(own_alone) > len(theirs) or (task is None and 2 * top < len(keys) and len(theirs) < SURE):
        return None
    if len(best) > 1:
        could = "; ".join(f"{name}: task={candidates[name][1]}" for name in best)
        raise UserError(f"the keys {', '.join(sorted(keys))} could be of {could}. Say which on the command line")
    return candidates[best[0]]


def is_setting(kind: type[pydantic.BaseModel], key: str) -> bool:
    """Tell whether a dotted key is a setting of the schema; entries of a mapping, as of optim.groups, are."""
    head, _, rest = key.partition(".")
    field = kind.model_fields.get(head)
    if field is None or not rest:
        return field is not None
    inner = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
    sections = [one for one in inner if issubclass(one, pydantic.BaseModel)]
    return any(is_setting(one, rest) for one in sections) if sections else get_origin(field.annotation) is dict


def originals() -> dict[str, tuple[LegacyConfig, str]]:
    """Every original by its name, with a task that replaces it."""
    found: dict[str, tuple[LegacyConfig, str]] = {}
    for name in task_names():
        original = find_task(name).original
        if original is not None:
            found.setdefault(original.name, (original, name))
    return found


def translate(original: LegacyConfig, values: Mapping[str, Any]) -> Translation:
    """Convert a recognised config; every key that nothing read is listed, with the reason where there is one."""
    read = ReadMapping(values)
    settings = plain(original.convert(read))
    left = [key for key, _ in leaves(values) if key not in read.seen]
    reasons = {key: _reason(original, key) for key in left}
    replaced = {key: why for key, why in reasons.items() if why is not None}
    return Translation(original.name, settings, replaced, [key for key in left if key not in replaced])


def _reason(original: LegacyConfig, key: str) -> str | None:
    return next((why for pattern, why in original.replaced.items() if fnmatch.fnmatchcase(key, pattern)), None)


class ReadMapping(Mapping):
    """A mapping that remembers, as dotted keys, which of its leaves were looked at."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", seen: set[str] | None = None):
        self._values, self._prefix = values, prefix
        self.seen: set[str] = set() if seen is None else seen

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, Mapping) and value:
            return ReadMapping(value, f"{self._prefix}{key}.", self.seen)
        self.seen.add(f"{self._prefix}{key}")
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def plain(value: Any) -> Any:
    """Nested mappings as dicts; what a ReadMapping holds counts as looked at."""
    return {key: plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
