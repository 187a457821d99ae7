"""Compare the facades with the originals' interfaces.

`python -m tests.contract.originals` prints how many names agree. originals.json has, for each public name of the five
originals, the parameters of its function or constructor in order with their defaults, its methods, properties and
public attributes; `added` marks names that the facades lacked at first. A name, or a method or attribute as
`Class.name`, may be absent if the page of docs/originals lists it under "Not here".
"""

import ast
import importlib
import inspect
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

ROOT = pathlib.Path(__file__).parents[2]
TABLE: dict[str, dict[str, dict]] = json.loads((pathlib.Path(__file__).with_name("originals.json")).read_text())
PAGES = {
    "fmri_autoencoder": "sherlock",
    "set_completion": "splatnlp",
    "hjepa": "hjepa",
    "criteria_evidence": "psy",
    "memory_lm": "memory",
}
SECOND = " (giblet, second generation)"
CONSTANTS = {"PAD": "<PAD>", "TOKEN_BONUS": math.log(2), "logging.INFO": 20}
UNREADABLE = ("...", "field(", "transforms.")  # defaults that the table does not spell out
# create_autoencoder serves both generations, so what is left out takes the default of the one that is meant.
OWN_DEFAULTS = {("fmri_autoencoder", "create_autoencoder")}


def names() -> list[tuple[str, str]]:
    return [(system, key) for system, table in TABLE.items() for key in table]


def offered(system: str, key: str) -> Any:
    """Return the facade's object of an entry of the table; None if it has none."""
    package = f"jaxtrain.systems.{system}"
    if f"{key}{SECOND}" in TABLE[system]:
        package += ".original.first_generation"
    return getattr(importlib.import_module(package), key.removesuffix(SECOND), None)


def out_of(system: str) -> set[str]:
    """Return the names that the system's page lists as not here."""
    section = (ROOT / f"docs/originals/{PAGES[system]}.md").read_text().partition("\n## Not here\n")[2]
    section = section.partition("\n## ")[0]
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`([\w.]+)`", cell)}


def faults(system: str, key: str, instance: Callable[[], Any] | None = None) -> list[str]:
    """Return what the facade's object lacks or names otherwise, a line each. instance: makes one for its attributes."""
    entry, facade, plain = TABLE[system][key], offered(system, key), key.removesuffix(SECOND)
    out = out_of(system)
    if facade is None:
        return [] if plain in out else [f"{plain}: not in the facade, and not listed as absent"]
    found = [
        f"{plain}: is no {base}" for base in entry.get("bases", []) if not issubclass(facade, base_class(system, base))
    ]
    for kind in ("function", "constructor"):
        if kind in entry:
            found += parameters(f"{plain}()", entry[kind], facade, 0, (system, plain) in OWN_DEFAULTS)
    for name, wanted in entry.get("methods", {}).items():
        method = getattr(facade, name, None)
        if method is None:
            found += [] if f"{plain}.{name}" in out else [f"{plain}.{name}: missing"]
            continue
        bound = isinstance(inspect.getattr_static(facade, name), (staticmethod, classmethod))
        found += parameters(f"{plain}.{name}()", wanted, method, 0 if bound else 1)
    one = instance() if instance is not None else facade
    expected = [*entry.get("properties", []), *(entry.get("attributes", []) if instance is not None else [])]
    found += [
        f"{plain}.{name}: missing" for name in expected if not hasattr(one, name) and f"{plain}.{name}" not in out
    ]
    return found


def base_class(system: str, name: str) -> type:
    """Return a class that the table names as a base: torch's, or one of the same original."""
    kinds = {"nn.Module": torch.nn.Module, "Dataset": torch.utils.data.Dataset}
    return kinds[name] if name in kinds else offered(system, name)


def parameters(label: str, wanted: list[str], function: Any, skip: int, own_defaults: bool = False) -> list[str]:
    """Compare a signature with the table's. Further parameters must be keyword-only or have names that follow `**`."""
    given = list(inspect.signature(function).parameters.values())[skip:]
    by_place = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword_only = False
    expected, named = [], []
    for text in wanted:
        name, _, default = text.partition("=")
        keyword_only = keyword_only or name.startswith("*")
        if not name.startswith("*"):
            (named if keyword_only else expected).append((name, default))
    found = []
    if [p.name for p in by_place] != [name for name, _ in expected]:
        names = [p.name for p in by_place]
        variadic = any(text.startswith("*") and not text.startswith("**") and text != "*" for text in wanted)
        if not variadic:
            found.append(f"{label}: takes {names} by place, wanted {[name for name, _ in expected]}")
    known = {p.name: p for p in given}
    for name, default in expected + named:
        if name not in known:
            variadic = any(p.kind is p.VAR_KEYWORD for p in given) and "**kwargs" in wanted
            found += [] if variadic else [f"{label}: no parameter {name}"]
        elif default and not own_defaults and not same(default, known[name].default):
            found.append(f"{label}: {name} is {known[name].default!r} by default, wanted {default}")
    return found


def same(text: str, value: Any) -> bool:
    if text.startswith(UNREADABLE):
        return True
    if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # of a dataclass; the factory gives the section's default
        return True
    if isinstance(value, tuple):  # for a list, which all calls would share
        value = list(value) if text.startswith("[") else value
    return value == (CONSTANTS[text] if text in CONSTANTS else ast.literal_eval(text))


def report() -> Iterator[str]:
    from tests.contract.test_originals import instances

    agreed, added, absent, total, once = 0, 0, 0, 0, 0
    for system, key in names():
        missing_once = TABLE[system][key].get("added", False)
        once += missing_once
        total += not missing_once
        if offered(system, key) is None:
            absent += 1
            continue
        agrees = not faults(system, key, instances().get((system, key)))
        agreed += agrees and not missing_once
        added += agrees and missing_once
    yield f"{agreed} of {total} names that were there have the original's interface"
    yield f"{added} of {once} names that were missing are there, with it; {absent} stay out (docs/originals, Not here)"


if __name__ == "__main__":
    print("\n".join(report()))
