"""Recognise and translate configs of the torch projects that the systems replace. No key is dropped silently."""

import dataclasses
import difflib
import fnmatch
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import pydantic

from jaxtrain.config import TrainingConfig
from jaxtrain.config_mistakes import WrongSettings
from jaxtrain.errors import UserError
from jaxtrain.task import LegacyConfig, find_task, task_names

UNUSABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError)  # for wrong types
SURE = 5  # with this many keys that only an original has, a file is the original's, whatever else it holds


@dataclasses.dataclass(frozen=True)
class Translation:
    """Translation of an original project's config.

    settings: nested settings of this project. replaced: keys that need no counterpart, with the reason. unknown: keys
    that nothing reads. meant: unknown key -> the original's key of similar spelling, if there is one.
    """

    original: str
    settings: dict[str, Any]
    replaced: dict[str, str]
    unknown: list[str]
    meant: dict[str, str]

    def lines(self) -> list[str]:
        """Return the translation as lines of YAML comments."""
        found = [f"a config of {self.original}; here it is"]
        found += [f"  {key}: {json.dumps(value)}" for key, value in leaves(self.settings)]
        found += [f"{key}: needs no counterpart: {why}" for key, why in self.replaced.items()]
        hint = lambda key: f"; did you mean {self.meant[key]}?" if key in self.meant else ""
        found += [f"{key}: not translated, nothing here reads it{hint(key)}" for key in self.unknown]
        return [f"# {line}" for line in found]


def recognise(values: Mapping[str, Any], task: str | None = None) -> tuple[LegacyConfig, str] | None:
    """Return the original project of a config without `task`, and a task that replaces it; None if there is none.

    The whole set of keys decides: a config of this project that only lacks its `task` holds more keys that are core
    settings and not the original's than the other way round. task: decides if the keys fit several originals; without
    it, UserError names them.
    """
    keys = {key for key, _ in leaves(values)}
    if task is None:
        candidates = originals()
    else:
        own = find_task(task).original
        candidates = {} if own is None else {own.name: (own, task)}
    scores = {name: len(keys & original.keys - original.unlisted) for name, (original, _) in candidates.items()}
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
    """Return True if a dotted key is a setting of the schema, or an entry of a mapping such as optim.groups."""
    head, _, rest = key.partition(".")
    field = kind.model_fields.get(head)
    if field is None or not rest:
        return field is not None
    inner = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
    sections = [one for one in inner if issubclass(one, pydantic.BaseModel)]
    return any(is_setting(one, rest) for one in sections) if sections else get_origin(field.annotation) is dict


def originals() -> dict[str, tuple[LegacyConfig, str]]:
    """Return every original by name, with a task that replaces it."""
    found: dict[str, tuple[LegacyConfig, str]] = {}
    for name in task_names():
        original = find_task(name).original
        if original is not None:
            found.setdefault(original.name, (original, name))
    return found


def translate(original: LegacyConfig, values: Mapping[str, Any], task: str | None = None) -> Translation:
    """Convert a recognised config; list every key that the conversion does not read, with the reason if there is one.

    task: the requested one, or Hydra's choice of the group `task`, for a conversion that depends on it. Raises
    UserError, with the key, for a value of a type that the original would not take.
    """
    _check_sections(original, values)
    read = ReadMapping(values, task=task)
    try:
        settings = plain(original.convert(read))
    except UNUSABLE as error:
        if isinstance(error, UserError) and not isinstance(error, WrongSettings):
            raise
        raise UserError(_blame(original, values, error, task)) from None
    left = [key for key, _ in leaves(values) if key not in read.seen]
    reasons = {key: _reason(original, key) for key in left}
    replaced = {key: why for key, why in reasons.items() if why is not None}
    unknown = [key for key in left if key not in replaced]
    near = {key: difflib.get_close_matches(key, original.keys - read.seen - {key}, 1, 0.85) for key in unknown}
    meant = {key: found[0] for key, found in near.items() if found}
    for section in ("data", "dataset"):
        own = [key for key, _ in leaves(values) if key.startswith(f"{section}.")]
        if own and set(own) <= set(unknown):
            names = ", ".join(own[:6])
            raise UserError(
                f"{section}: nothing here reads {names}, so the run would train on other data; name the task and its "
                "data with this project's settings (--print-config shows them), or leave the section out"
            )
    return Translation(original.name, settings, replaced, unknown, meant)


def _check_sections(original: LegacyConfig, values: Mapping[str, Any]) -> None:
    """Raise UserError if a section of the original holds a plain value; null is allowed."""
    sections = {key[:place] for key in original.keys for place, letter in enumerate(key) if letter == "."}
    for key in sorted(sections - original.keys):  # some keys may be a section or a value
        place: Any = values
        for part in key.split("."):
            place = place.get(part) if isinstance(place, Mapping) else None
        if place is not None and not isinstance(place, Mapping):
            inside = sorted(one for one in original.keys if one.startswith(f"{key}."))[:2]
            raise UserError(f"{key}: got {place!r}, wanted a section with keys such as {', '.join(inside)}")


def _blame(original: LegacyConfig, values: Mapping[str, Any], error: Exception, task: str | None) -> str:
    """Return a message that names the value without which the config could be converted, and the error."""
    why = error.first if isinstance(error, WrongSettings) else str(error)
    why = why.replace("'ReadMapping'", "a section")
    candidates = dict(leaves(values))
    parents = {key[:place]: None for key in candidates for place, letter in enumerate(key) if letter == "."}
    for key, value in (candidates | dict(sorted(parents.items(), key=lambda one: -one[0].count(".")))).items():
        try:
            original.convert(ReadMapping(_without(values, key), task=task))
        except UNUSABLE:
            continue
        return f"{key}: {'what it holds' if key in parents else repr(value)} cannot be used here: {why}"
    return f"not a config of {original.name}: {why}"


def _without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    if rest:
        return {**values, head: _without(values[head], rest)}
    return {name: value for name, value in values.items() if name != head}


def _reason(original: LegacyConfig, key: str) -> str | None:
    return next((why for pattern, why in original.replaced.items() if fnmatch.fnmatchcase(key, pattern)), None)


class ReadMapping(Mapping):
    """Mapping that records, as dotted keys, which of its leaves were read. task: the requested one, if any."""

    def __init__(
        self, values: Mapping[str, Any], prefix: str = "", seen: set[str] | None = None, task: str | None = None
    ):
        self._values, self._prefix, self.task = values, prefix, task
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
    """Convert nested mappings to dicts; all leaves of a ReadMapping count as read."""
    return {key: plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
