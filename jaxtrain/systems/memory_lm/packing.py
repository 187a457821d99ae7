"""Pack documents of any length into rows of fixed length, with segment and position ids that separate them."""

from collections.abc import Iterable, Sequence

import numpy as np

IGNORE = -100
OPEN_ROWS = 64  # most recent unfilled rows that are searched for room


def pack(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], length: int, pad_token_id: int, split: bool = True
) -> dict[str, np.ndarray]:
    """Pack (ids, labels) pairs into rows of `length` tokens.

    split: fill rows in order and cut a document at a row's end (its rest starts the next row, as a segment of its own).
    Otherwise a document goes whole into the fullest open row with room, truncated to `length`. Returns input_ids,
    labels, position_ids (from 0 in each segment) and segment_ids (1, 2, ... in each row, 0 for padding), int32 [row,
    length]. Documents of fewer than two tokens have no next token to predict and are left out.
    """
    return columns_of(_fill(documents, length) if split else _fit(documents, length), length, pad_token_id)


def columns_of(rows: Sequence[Sequence], length: int, pad_token_id: int) -> dict[str, np.ndarray]:
    """Return the columns of `pack` from rows that are lists of (ids, labels) pieces."""
    count = len(rows)
    columns = {
        "input_ids": np.full((count, length), pad_token_id, np.int32),
        "labels": np.full((count, length), IGNORE, np.int32),
        "position_ids": np.zeros((count, length), np.int32),
        "segment_ids": np.zeros((count, length), np.int32),
    }
    for row, pieces in enumerate(rows):
        start = 0
        for number, (ids, labels) in enumerate(pieces, start=1):
            span = slice(start, start + len(ids))
            columns["input_ids"][row, span] = ids
            columns["labels"][row, span] = labels
            columns["position_ids"][row, span] = np.arange(len(ids))
            columns["segment_ids"][row, span] = number
            start += len(ids)
    return columns


def padding_ratio(columns: dict[str, np.ndarray]) -> float:
    """Return the fraction of tokens that are padding."""
    present = columns["segment_ids"] > 0 if "segment_ids" in columns else columns["attention_mask"] > 0
    return float(1 - present.mean()) if present.size else 0.0


def _fill(documents, length: int) -> list[list[Sequence]]:
    rows: list[list] = []
    room = 0
    for ids, labels in documents:
        start = 0
        while len(ids) - start >= 2:
            if room < 2:
                rows.append([])
                room = length
            take = divide(len(ids) - start, room)
            rows[-1].append((ids[start : start + take], labels[start : start + take]))
            start, room = start + take, room - take
    return rows


def divide(tokens: int, room: int) -> int:
    """Return the number of a document's remaining `tokens` to put into a row with `room` free positions."""
    take = min(room, tokens)
    return take - (take > 2) if tokens - take == 1 else take  # leave 2: a single token has no next one


def _fit(documents, length: int) -> list[list[Sequence]]:
    rows: list[list] = []
    open_rows: list[tuple[int, int]] = []  # (room, row)
    for ids, labels in documents:
        ids, labels = ids[:length], labels[:length]
        if len(ids) < 2:
            continue
        fitting = [entry for entry in open_rows if entry[0] >= len(ids)]
        if fitting:
            room, row = min(fitting)
            open_rows.remove((room, row))
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append((ids, labels))
        if room - len(ids) >= 2:
            open_rows = [*open_rows, (room - len(ids), row)][-OPEN_ROWS:]
    return rows
