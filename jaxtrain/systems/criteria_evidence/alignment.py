"""From an answer's text to its place in the context, in characters and in tokens."""

from collections.abc import Sequence


class AnswerNotFound(ValueError):
    """An answer that is not in its context, or that the tokenizer cut away."""


def find_answer_span(context: str, answer: str) -> tuple[int, int]:
    """[start, end) of the stripped answer in the context: exact, else in lower case.

    The lower-case place counts characters of the lower-cased context, as in the original: a letter whose lower case is
    longer ("İ") shifts it. Raises AnswerNotFound.
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
    """First and last token of the characters [start, end).

    offsets: characters [from, to) of every token; (0, 0) marks special tokens and padding. sequence_ids: 0 for tokens
    of the context, anything else is passed over; None takes all. The first token is the one that holds `start`, the
    last the first one that holds `end`. Raises AnswerNotFound where one is missing: cut away, or starting on a blank.
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
