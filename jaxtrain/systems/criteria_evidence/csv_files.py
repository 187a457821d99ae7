"""Read the annotation CSV files and look up each row's criterion text."""

import csv
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from jaxtrain.errors import UserError

Row = dict[str, str]


def read_rows(path: str | pathlib.Path, required: Sequence[str]) -> list[Row]:
    """Return all rows of a CSV file (RFC 4180, UTF-8, line breaks inside quotes allowed).

    Raises UserError if the file is missing, has no header or no rows, or lacks a required column.
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
    """Return the label column as integers. Raises UserError that names the first row without an integer."""
    labels = []
    for number, row in enumerate(rows):
        try:
            labels.append(int(row[column]))
        except (TypeError, ValueError):
            raise UserError(f"{source}: row {number}: {column} is {row[column]!r}, wanted a whole number") from None
    return labels


def read_criteria(path: str | pathlib.Path) -> dict[str, str]:
    """Read criterion texts by id from a JSON list of {"id", "text"}; see `criterion_map`.

    Raises UserError if the file is missing or holds something else.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; wanted a JSON list of {{id, text}}")
    try:
        return criterion_map(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a JSON list of {{id, text}}: {error}") from None


def criterion_map(entries: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the non-empty texts, each under its id as written, in upper case and in lower case."""
    texts: dict[str, str] = {}
    for entry in entries:
        name, text = str(entry["id"]), (entry.get("text") or "").strip()
        if text:
            texts |= {name: text, name.upper(): text, name.lower(): text}
    return texts


IDENTIFIERS = ("criterion_id", "DSM5_symptom")


def criterion_text(row: Row, texts: Mapping[str, str], column: str | None = None) -> str:
    """Return the text of a row's criterion.

    A `criterion_text` column wins. Otherwise the first non-empty one of `column`, criterion_id and DSM5_symptom is
    looked up in `texts`: as written, in upper, lower and title case. If it is not found, the identifier itself is
    returned with blanks for `_` and `-`.
    """
    text = (row.get("criterion_text") or "").strip()
    if text:
        return text
    names = [name for name in (column, *IDENTIFIERS) if name]
    identifier = next((row[name].strip() for name in names if (row.get(name) or "").strip()), "")
    for key in (identifier, identifier.upper(), identifier.lower(), identifier.title()):
        if key in texts:
            return texts[key]
    return identifier.replace("_", " ").replace("-", " ").strip()
