"""A run's epochs and evaluations in its checkpoints: lines of a file, written and hashed one after another.

In meta.json they would cost every save several copies of all of them, as objects and as text, and what is left of
those in the allocator's pages makes a long run grow by far more than its history.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtrain import strict_json
from jaxtrain.errors import UserError

FILE = "history.jsonl"
NAMES = ("train_history", "val_history")
WRITTEN = "history_lines"  # in meta.json: how many entries of each are in the file; it lists those that came after


def split(meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list]]:
    """The rest of `meta`, and its histories as they are now: they get longer, their entries stay as they are."""
    return {k: v for k, v in meta.items() if k not in NAMES}, {name: list(meta[name]) for name in NAMES if name in meta}


def write(folder: pathlib.Path, histories: Mapping[str, list]) -> dict[str, Any]:
    """The file, on the disk when it returns. Gives what meta.json says of it."""
    if not histories:
        return {}
    with (folder / FILE).open("w") as file:
        for name, entries in histories.items():
            file.writelines(strict_json.dumps_whole({"of": name, "values": entry}) + "\n" for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    return after(histories, {name: len(entries) for name, entries in histories.items()})


def after(histories: Mapping[str, list], written: Mapping[str, int]) -> dict[str, Any]:
    """Return meta.json's entry for histories of which the file holds `written` points; {} if there is no file."""
    rest = {name: entries[written.get(name, 0) :] for name, entries in histories.items()}
    return rest | ({WRITTEN: dict(written)} if written else {})


def read(folder: pathlib.Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` with its histories in full. Raises UserError where the file is damaged."""
    if WRITTEN not in meta:
        return dict(meta)
    path = folder / FILE
    found: dict[str, list] = {name: [] for name in meta[WRITTEN]}
    try:
        with path.open() as file:
            for line in map(strict_json.loads_whole, file):
                found[line["of"]].append(line["values"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged: {getattr(error, 'strerror', None) or error}") from None
    whole = {name: entries + meta.get(name, []) for name, entries in found.items()}
    return {key: value for key, value in meta.items() if key != WRITTEN} | whole
