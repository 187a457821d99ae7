"""Store a run's epochs and evaluations in its checkpoints, as lines of a file that are written one by one.

In meta.json, every save would make several copies of all of them, as objects and as text. Fragments of these copies in
the allocator's pages would make the memory of a long run grow by far more than its history.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtrain import strict_json
from jaxtrain.errors import UserError

FILE = "history.jsonl"
NAMES = ("train_history", "val_history")
WRITTEN = "history_lines"  # key in meta.json: how many entries of each are in the file; meta.json lists later ones


def split(meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list]]:
    """Return the rest of `meta`, and copies of its histories: these lists keep growing, but entries never change."""
    return {k: v for k, v in meta.items() if k not in NAMES}, {name: list(meta[name]) for name in NAMES if name in meta}


def write(folder: pathlib.Path, histories: Mapping[str, list]) -> dict[str, Any]:
    """Write the file durably (fsync); return its entry for meta.json."""
    if not histories:
        return {}
    with (folder / FILE).open("w") as file:
        for name, entries in histories.items():
            file.writelines(strict_json.dumps_whole({"of": name, "values": entry}) + "\n" for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    return after(histories, {name: len(entries) for name, entries in histories.items()})


def after(histories: Mapping[str, list], written: Mapping[str, int]) -> dict[str, Any]:
    """Return meta.json's entry for histories whose first `written` entries are in the file."""
    rest = {name: entries[written.get(name, 0) :] for name, entries in histories.items()}
    return rest | ({WRITTEN: dict(written)} if written else {})


def read(folder: pathlib.Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `meta` with its full histories. Raises UserError if the file is damaged."""
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
