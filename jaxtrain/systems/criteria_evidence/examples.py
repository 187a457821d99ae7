"""Turn rows of the annotation files into tokens, labels and answer positions, before padding."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jaxtrain.systems.criteria_evidence.csv_files import Row, criterion_text, labels_of
from jaxtrain.systems.criteria_evidence.tokenization import Encoded, Tokenizer


class AnswerNotFound(ValueError):
    """Raised if an answer is not in its context, or was truncated by the tokenizer."""


def find_answer_span(context: str, answer: str) -> tuple[int, int]:
    """Return the characters [start, end) of the stripped answer in the context: an exact match, else in lower case.

    As in the original, a lower-case match counts characters of the lower-cased context, so a letter whose lower case
    is longer ("İ") shifts it. Raises AnswerNotFound.
    """
    answer = answer.strip()
    start = context.find(answer)
    if start < 0:
        start = context.lower().find(answer.lower())
    if start < 0:
        raise AnswerNotFound("Answer span not found in context.")
    return start, start + len(answer)


def token_span_from_char(
    offsets: Sequence[tuple[int, int]], start: int, end: int, sequence_ids: Sequence[int | None] | None = None
) -> tuple[int, int]:
    """Return the first and last token of the characters [start, end).

    offsets: characters [from, to) of every token; (0, 0) marks special tokens and padding. sequence_ids: 0 for tokens
    of the context, others are skipped; None takes all tokens. The first token contains the character `start`, the last
    one is the first token that reaches `end`. Raises AnswerNotFound if either is missing: it was truncated, or the
    span starts on a blank.
    """
    first = last = None
    for i, (begin, stop) in enumerate(offsets):
        if (begin, stop) == (0, 0) or (sequence_ids is not None and sequence_ids[i] != 0):
            continue
        if first is None and begin <= start < stop:
            first = i
        if begin < end <= stop:
            last = i
            break
    if first is None or last is None:
        raise AnswerNotFound("Unable to align character span with token offsets.")
    return first, last


SIDES = {
    "criteria": ("criteria",),
    "evidence": ("evidence",),
    "share": ("evidence",),
    "joint": ("criteria", "evidence"),
}


@dataclasses.dataclass(frozen=True)
class Columns:
    """Column names of the CSV file."""

    sentence: str = "sentence_text"
    status: str = "status"
    context: str = "post_text"
    answer: str = "sentence_text"
    criterion: str | None = None  # looked at before criterion_id and DSM5_symptom


@dataclasses.dataclass(frozen=True)
class Examples:
    """Tokenized rows of a file for one architecture.

    texts: the tokens of every row, by side ("" for a single text, "criteria_" and "evidence_" for joint). labels: int32
    [row] or None. spans: int32 [row, 2] or None, first and last token of the answer, -1 if it was not found. problems:
    row -> why its answer was not found. contexts, answers: the texts, for reports. criteria: the criterion text of
    every row. posts: the sides that hold whole posts; their padded width is evidence_max_length.
    """

    texts: Mapping[str, Encoded]
    labels: np.ndarray | None
    spans: np.ndarray | None
    problems: Mapping[int, str]
    contexts: Sequence[str] = ()
    answers: Sequence[str] = ()
    criteria: Sequence[str] = ()
    posts: frozenset[str] = frozenset()


def make_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    architecture: str,
    *,
    pair: bool = False,
    criterion_texts: Mapping[str, str] | None = None,
    columns: Columns = Columns(),
    max_length: int = 256,
    evidence_max_length: int = 512,
    cache: pathlib.Path | None = None,
    presence: Literal["post", "leak"] | None = None,
) -> Examples:
    """Tokenize what an architecture reads: the sentence for criteria, the post for evidence and share, both for joint.

    pair: tokenize (text, criterion text) pairs, as family `architectures` does; the answer is searched in the text
    only. Rows are not filtered by status: absent symptoms have answers too. presence: for evidence as a classification,
    use the status as label instead of a span. "post" reads the post; "leak" does what the original does: rows with a
    nonzero status read their evidence sentence only.
    """
    sides = SIDES[architecture]
    posts = frozenset({"evidence_" if len(sides) > 1 else ""} if "evidence" in sides else ())
    statuses = labels_of(rows, columns.status) if architecture != "evidence" or presence else None
    names = [criterion_text(row, criterion_texts or {}, columns.criterion) for row in rows]
    pairs = names if pair else None
    texts = {}
    for side in sides:
        column = columns.sentence if side == "criteria" else columns.context
        longest = max_length if side == "criteria" else evidence_max_length
        key = f"{side}_" if len(sides) > 1 else ""
        read = [row[column] for row in rows]
        if presence == "leak" and statuses is not None:
            read = [
                row[columns.answer] if status else text for row, status, text in zip(rows, statuses, read, strict=True)
            ]
        texts[key] = tokenizer.encode_cached(read, pairs, longest, cache)
    labels = None if statuses is None else np.array(statuses, np.int32)
    if architecture == "criteria":
        sentences = [row[columns.sentence] for row in rows]
        return Examples(texts, labels, None, {}, sentences, (), names)
    if presence:
        return Examples(texts, labels, None, {}, [row[columns.context] for row in rows], (), names, posts)
    contexts, answers = [row[columns.context] for row in rows], [row[columns.answer] for row in rows]
    spans, problems = locate_answers(contexts, answers, texts["evidence_" if len(sides) > 1 else ""], pair)
    return Examples(texts, labels, spans, problems, contexts, answers, names, posts)


def locate_answers(
    contexts: Sequence[str], answers: Sequence[str], encoded: Encoded, pair: bool
) -> tuple[np.ndarray, dict[int, str]]:
    """Return int32 [row, 2], first and last token of every answer, and the reasons by row for answers not found.

    Rows without an answer hold (-1, -1).
    """
    spans, problems = np.full((len(contexts), 2), -1, np.int32), {}
    for i, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
        row = encoded.row(i)
        offsets = [tuple(pair) for pair in row["offsets"].tolist()]
        try:
            start, end = find_answer_span(context, answer)
            spans[i] = token_span_from_char(offsets, start, end, row["sequence"].tolist() if pair else None)
        except AnswerNotFound as error:
            problems[i] = str(error)
    return spans, problems


def padded(encoded: Encoded, rows: Sequence[int], width: int, pad_id: int) -> dict[str, np.ndarray]:
    """Return input_ids, token_type_ids and attention_mask, int32 [row, width], padded at the end."""
    shape = (len(rows), width)
    ids, types, mask = np.full(shape, pad_id, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for i, row in enumerate(rows):
        piece = slice(encoded.bounds[row], encoded.bounds[row + 1])
        length = piece.stop - piece.start
        ids[i, :length], types[i, :length], mask[i, :length] = encoded.ids[piece], encoded.types[piece], 1
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
