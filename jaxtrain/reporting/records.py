"""Read a run folder: its config, its logged points and its summary."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxtrain import config_io, strict_json
from jaxtrain.errors import UserError

PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg")
LARGEST_PICTURE = 4 * 2**20  # bytes; a page with larger pictures is slow to open


@dataclasses.dataclass(frozen=True)
class Record:
    """One run. points: the objects of metrics.jsonl. tables: JSON files that `evaluate` wrote, by name. settings: the
    resolved config, by dotted key."""

    name: str
    folder: pathlib.Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any]
    points: list[dict[str, Any]]
    tables: dict[str, Any]
    pictures: list[pathlib.Path]

    def series(self, metric: str, split: str) -> list[tuple[float, float]]:
        """Return (step, value) of every logged point of the split that has the metric."""
        rows = (p for p in self.points if p["split"] == split and p["values"].get(metric) is not None)
        return [(p["step"], float(p["values"][metric])) for p in rows]

    def metrics(self) -> list[str]:
        """Return every logged metric's name, in the order of first appearance."""
        return list(dict.fromkeys(name for point in self.points for name in point["values"]))


def read(folder: str | pathlib.Path) -> Record:
    """Read a run folder. Skips truncated lines of metrics.jsonl. Raises UserError if it is no run folder."""
    folder = pathlib.Path(folder)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"--run {folder}: no run folder, it holds no config.yaml; give the folder that a run wrote")
    reports = sorted(path for path in folder.glob("reports/**/*") if path.is_file())
    return Record(
        name=folder.resolve().name,
        folder=folder,
        settings=config_io.flatten(config_io.read(folder / "config.yaml")),
        summary=_sections(folder / "summary.json", ("best", "final", "throughput")),
        environment=_sections(folder / "environment.json"),
        points=_lines(folder / "metrics.jsonl"),
        tables={str(path.relative_to(folder)): _json(path) for path in reports if path.suffix == ".json"},
        pictures=[path for path in reports if path.suffix in PICTURES and path.stat().st_size <= LARGEST_PICTURE],
    )


def _json(path: pathlib.Path) -> Any:
    """Return a file's JSON, {} if there is no file. Raises UserError if it cannot be read."""
    try:
        return strict_json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {why}; move it away to go on without it") from None


def _sections(path: pathlib.Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a file's JSON object, {} if there is no file. Raises UserError unless its entries of these names, if
    present, are objects."""
    found = _json(path)
    if not isinstance(found, dict) or not all(isinstance(found.get(name, {}), dict) for name in names):
        raise UserError(f"{path}: is not what a run writes; move it away to go on without it")
    return found


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    points = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            point = strict_json.loads(line)
            values = {name: math.nan if v is None else float(v) for name, v in point["values"].items()}
            float(point["step"])  # raises an error if it is no number
            points.append(point | {"split": str(point["split"]), "values": values})
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # the run is still writing the line, or was killed
    return points
