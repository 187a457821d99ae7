"""Reading the annotation files, and the text of a criterion for every row."""

import csv
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from jaxtrain.errors import UserError

Row = dict[str, str]


def read_rows(path: str | pathlib.Path, required: Sequence[str]) -> list[Row]:
    """All rows of a CSV file (RFC 4180, UTF-8, line breaks inside quotes allowed) that has the required columns.

    Raises UserError for a missing file, one without header or rows, or without a required column.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; wanted a CSV with the columns {', '.join(required)}")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if not reader.fieldnames:
            raise UserError(f"{path}: is empty; wanted a header with the columns {', '.join(required)}")
        columns = list(reader.fieldnames)
        rows = list(reader)
    absent = [name for name in required if name not in columns]
    if absent:
        raise UserError(f"{path}: no column {', '.join(absent)}; it has {', '.join(columns)}")
    if not rows:
        raise UserError(f"{path}: has a header but no rows")
    return rows


def labels_of(rows: Sequence[Row], column: str, source: str | pathlib.Path = "rows") -> list[int]:
    """The label column as integers. Raises UserError naming the first row where it is none."""
    labels = []
    for number, row in enumerate(rows):
        try:
            labels.append(int(row[column]))
        except (TypeError, ValueError):
            raise UserError(f"{source}: row {number}: {column} is {row[column]!r}, wanted a whole number") from None
    return labels


def read_criteria(path: str | pathlib.Path) -> dict[str, str]:
    """Criterion texts by id, from a JSON list of {"id", "text"}; see `criterion_map`."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; wanted a JSON list of {{id, text}}")
    try:
        return criterion_map(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a JSON list of {{id, text}}: {error}") from None


def criterion_map(entries: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Texts that are not empty, under the id as it is, in capitals and in small letters."""
    found: dict[str, str] = {}
    for entry in entries:
        name, text = str(entry["id"]), (entry.get("text") or "").strip()
        if text:
            found |= {name: text, name.upper(): text, name.lower(): text}
    return found


IDENTIFIERS = ("criterion_id", "DSM5_symptom")


def criterion_text(row: Row, texts: Mapping[str, str], column: str | None = None) -> str:
    """The criterion that a row is about, in words.

    A `criterion_text` column wins; else the first of `column`, criterion_id, DSM5_symptom that is filled is looked up
    as it is, in capitals, in small letters and capitalised; what is not found is the identifier itself with blanks for
    `_` and `-`.
    """
    own = (row.get("criterion_text") or "").strip()
    if own:
        return own
    names = [name for name in (column, *IDENTIFIERS) if name]
    identifier = next((row[name].strip() for name in names if (row.get(name) or "").strip()), "")
    for key in (identifier, identifier.upper(), identifier.lower(), identifier.title()):
        if key in texts:
            return texts[key]
    return identifier.replace("_", " ").replace("-", " ").strip()
