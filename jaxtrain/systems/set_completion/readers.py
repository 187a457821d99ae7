"""Read tokenised builds from the original's sources: tab-separated files, URLs, S3, SQLite."""

import csv
import importlib.util
import io
import itertools
import json
import pathlib
import sqlite3
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion.masking import PADDING

COLUMNS = ("ability_tags", "weapon_id")


class Corpus(NamedTuple):
    """Sets of ids. tokens: int16 or int32 [set, position], padded at the end with PADDING. weapons: int32 [set, 1]."""

    tokens: np.ndarray
    weapons: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray) -> "Corpus":
        return Corpus(self.tokens[rows], self.weapons[rows])


def read_corpus(source: str, table_name: str = "data", max_rows: int | None = None) -> Corpus:
    """Read the sets of a file or URL with the columns ability_tags (a JSON list of ids) and weapon_id (an int).

    Raises UserError that names the row for other content, and for a file without rows.
    """
    rows = itertools.islice(_rows(source, table_name), max_rows)
    sets, weapons = [], []
    for number, (tags, weapon) in enumerate(rows, start=1):
        try:
            ids = json.loads(tags)
            sets.append(np.unique(np.asarray(ids, np.int64)) if ids else np.empty(0, np.int64))
            weapons.append(int(weapon))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{source}: row {number} holds ability_tags={tags!r}, weapon_id={weapon!r}; wanted a JSON list of "
                f"token ids and a weapon id ({error})"
            ) from None
        if not len(sets[-1]):
            raise UserError(f"{source}: row {number} is an empty set; write it as the id of <NULL>")
    if not sets:
        raise UserError(f"{source}: holds no rows")
    return make_corpus(sets, weapons)


def make_corpus(sets: list, weapons: list[int]) -> Corpus:
    """Return a Corpus of ragged lists of ids, padded to one array."""
    width, largest = max(map(len, sets)), max(map(max, sets))
    tokens = np.full((len(sets), width), PADDING, np.int16 if largest < 1 << 15 else np.int32)
    for row, ids in zip(tokens, sets, strict=True):
        row[: len(ids)] = ids
    return Corpus(tokens, np.asarray(weapons, np.int32)[:, None])


def write_corpus(folder: pathlib.Path, sets, weapons, vocabulary: dict, weapon_vocabulary: dict) -> pathlib.Path:
    """Write tokenized.csv, vocab.json and weapon_vocab.json to `folder`; return the path of tokenized.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenized.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(COLUMNS)
        writer.writerows((json.dumps([int(i) for i in ids]), int(w)) for ids, w in zip(sets, weapons, strict=True))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "weapon_vocab.json").write_text(json.dumps(weapon_vocabulary))
    return path


def _rows(source: str, table_name: str) -> Iterator[tuple[str, str]]:
    if source.startswith("s3://"):
        yield from _table(_from_s3(source), source)
    elif source.startswith(("http://", "https://")):
        with urllib.request.urlopen(source) as answer:
            yield from _table(io.TextIOWrapper(answer, "utf-8", newline=""), source)
    elif not pathlib.Path(source).is_file():
        raise UserError(f"data.path: {source} does not exist")
    elif source.endswith((".db", ".sqlite")):
        yield from _from_sqlite(source, table_name)
    else:
        with open(source, newline="") as file:
            yield from _table(file, source)


def _table(lines, source: str) -> Iterator[tuple[str, str]]:
    csv.field_size_limit(1 << 24)
    reader = csv.DictReader(lines, delimiter="\t")
    absent = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if absent:
        columns = ", ".join((reader.fieldnames or [])[:8]) or "nothing"
        raise UserError(
            f"{source}: lacks the column {' and '.join(absent)}; its header holds {columns}. "
            "The file is tab separated in spite of its name"
        )
    for row in reader:
        yield row["ability_tags"], row["weapon_id"]


def _from_sqlite(source: str, table_name: str) -> Iterator[tuple[str, str]]:
    connection = sqlite3.connect(f"file:{source}?mode=ro", uri=True)
    try:
        quoted = table_name.replace('"', '""')
        yield from connection.execute(f'SELECT ability_tags, weapon_id FROM "{quoted}"')
    except sqlite3.OperationalError as error:
        raise UserError(f"{source}: cannot read the table {table_name!r} (data.table_name): {error}") from None
    finally:
        connection.close()


def _from_s3(source: str):
    if importlib.util.find_spec("boto3") is None:
        raise UserError(f"data.path: {source} needs boto3 (pip install boto3)")
    import boto3

    bucket, _, key = source.removeprefix("s3://").partition("/")
    body = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"]
    return io.StringIO(body.read().decode("utf-8"))
