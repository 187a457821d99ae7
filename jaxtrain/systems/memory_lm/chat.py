"""Read conversations in their four formats, render them with chat templates, and find the assistant's text."""

import contextlib
import datetime
import json
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

ASSISTANT = ("assistant", "model", "gpt", "bot")
Span = tuple[int, int]


def messages_of(row: Mapping[str, Any]) -> list | None:
    """Return a row's turns: `messages`, else `conversations`, else `prompt` and `response`; None if it has none.

    A column of None or NaN is passed over, as in rows of several formats. Raises UserError if a column holds no turns.
    """
    columns = [column for column in ("messages", "conversations") if column in row]
    for column in columns:
        if not _is_missing(row[column]):
            return _listed(column, row[column])
    if "prompt" in row and "response" in row:
        if _is_missing(row["prompt"]) and _is_missing(row["response"]):
            raise UserError("a chat row has neither a prompt nor a response: leave such rows out")
        return [*_said("user", row["prompt"]), *_said("assistant", row["response"])]
    if columns:
        raise UserError(f"a chat row has None in {' and '.join(columns)}: leave such rows out")
    return None


def _listed(column: str, value: Any) -> list:
    """Return a column of turns as a list: a list or an array of mappings, JSON text of one, or a mapping of lists."""
    entries = value
    if isinstance(value, str) and value.strip():
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        lists = {name: list(items) for name, items in value.items() if isinstance(items, (list, tuple, np.ndarray))}
        if lists and len(lists) == len(value):
            if len(set(map(len, lists.values()))) > 1:
                raise UserError(f"{column} of a chat row holds lists of different lengths, wanted one entry per turn")
            return [dict(zip(lists, items, strict=True)) for items in zip(*lists.values(), strict=True)]
        value = [value]
    if isinstance(value, str) and not value.strip():
        value = []
    if not isinstance(value, (list, tuple, np.ndarray)):
        shown = reprlib.repr(entries)
        raise UserError(f"{column} of a chat row is {shown}, wanted a list of turns, {{role: ..., content: ...}} each")
    return list(value)


def _said(role: str, value: Any) -> list:
    """Return the turns of a prompt or a response: one of its text or parts, or those that it lists itself."""
    if isinstance(value, (list, tuple, np.ndarray)) and len(value) and all(map(_is_turn, value)):
        return list(value)
    if _is_turn(value):
        return [value]
    return [{"role": role, "content": value}]


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and not value.keys().isdisjoint(("role", "from"))


def turns(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Return (role, text) of each turn; `from` and `value` are accepted for `role` and `content`. A turn without
    content, such as a call of a tool, has the text "".

    Raises UserError for a turn that is no mapping, a role that is no text, and content that is not text.
    """
    return [_turn(number, turn) for number, turn in enumerate(messages)]


def _turn(number: int, turn: Any) -> tuple[str, str]:
    if isinstance(turn, str):
        with contextlib.suppress(ValueError):
            turn = json.loads(turn)
    if not isinstance(turn, Mapping):
        raise UserError(f"turn {number} of a chat row is {reprlib.repr(turn)}, wanted {{role: ..., content: ...}}")
    role = _first(turn, ("role", "from"))
    if not isinstance(role, (str, int, float)):
        raise UserError(f"turn {number} of a chat row has the role {reprlib.repr(role)}, wanted a text")
    return str(role) or "unknown", content(_first(turn, ("content", "value")))


def _first(turn: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first of these fields that holds something, else ""."""
    values = (turn.get(name) for name in names)
    return next((value for value in values if not (_is_missing(value) or (isinstance(value, str) and not value))), "")


def _is_missing(value: Any) -> bool:
    """Return True for None, and for NaN and pandas' NA, which tables have in its place."""
    nan = isinstance(value, (float, np.floating)) and math.isnan(value)
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")


class Parts(str):
    """Text of a turn that was given as a list of parts; `parts` keeps the list for templates that read it."""

    parts: list[dict[str, str]]


def content(value: Any) -> str:
    """Return the text of a turn: a string, a number, or parts `{"type": "text", "text": ...}` (or strings), joined.

    Raises UserError for a part that is not text, and for an object that has no text.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Mapping):
        value = [value]
    if _is_missing(value):
        return ""
    if isinstance(value, (str, numbers.Number, np.generic, datetime.date, datetime.time)):
        return str(value)
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise UserError(f"the content of a chat turn is {reprlib.repr(value)}, wanted a text or a list of parts")
    joined = Parts("".join(texts := [_text(part) for part in value]))
    joined.parts = [{"type": "text", "text": text} for text in texts]
    return joined


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if text is None and isinstance(part, Mapping) and part.get("type") == "text":
        return ""
    if isinstance(text, (str, int, float)):
        return str(text)
    if text is not None:
        raise UserError(f"a part of a chat turn has the text {reprlib.repr(text)}, wanted a string")
    kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(f"a chat turn has a part of type {kind}; this model reads text only: leave such rows out")


def is_assistant(role: str) -> bool:
    return role.strip().lower() in ASSISTANT


def overlaps(start: int, end: int, spans: Sequence[Span]) -> bool:
    """Return True if the characters [start, end) overlap one of the spans; False for an empty range."""
    return end > start and any(start < last and end > first for first, last in spans)


def transcript(conversation: Sequence[tuple[str, str]], end: str = "") -> tuple[str, list[Span]]:
    """Return the conversation as `<|role|>` lines and contents, and the spans of the assistant's text.

    `end` is appended to each assistant turn and belongs to its span.
    """
    text, spans = "", []
    for i, (role, content) in enumerate(conversation):
        text += ("\n" if i else "") + f"<|{role}|>\n"
        start = len(text)
        said = content + end if is_assistant(role) else content
        text += said
        if is_assistant(role) and said:
            spans.append((start, len(text)))
    return text, spans


def render(tokenizer: Any, conversation: Sequence[tuple[str, str]], manner: str = "auto") -> tuple[str, list[Span]]:
    """Return a conversation as text and the spans to learn.

    With manner "auto" the tokenizer's chat template is used if it has one, else `transcript`. A span is an assistant
    turn with its end marker; if the template rewrites earlier turns, it is the turn's content only.
    """
    if tokenizer.chat_template is None or manner != "auto":
        return transcript(conversation, tokenizer.eos_token or "")
    messages = as_messages(conversation, _reads_parts(tokenizer, conversation))
    text = _template(tokenizer, messages)
    spans, end = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = _template(tokenizer, messages[:i], True), _template(tokenizer, messages[: i + 1])
        if text.startswith(before) and text.startswith(after.rstrip("\n")):
            spans.append((len(before), len(after.rstrip("\n"))))
        else:  # the template rewrites earlier turns: learn the content only
            said = conversation[i][1]
            end = text.find(said, end)
            if end >= 0 and said:
                spans.append((end, end + len(said)))
        end = spans[-1][1] if spans else 0
    return text, spans


def as_messages(conversation: Sequence[tuple[str, str]], parts: bool = False) -> list[dict[str, Any]]:
    """Return turns as messages with the roles that templates know. parts: pass a turn's parts as a list."""
    names = {"human": "user", "unknown": "user"}
    role_of = lambda role: "assistant" if is_assistant(role) else names.get(role.lower(), role.lower())
    return [
        {"role": role_of(role), "content": said.parts if parts and isinstance(said, Parts) else said}
        for role, said in conversation
    ]


def _reads_parts(tokenizer: Any, conversation: Sequence[tuple[str, str]]) -> bool:
    """Return True if a turn was given in parts and the template reads parts.

    A template for plain strings raises an error or prints the list.
    """
    if not any(isinstance(said, Parts) for _, said in conversation):
        return False
    probe = "a part of a turn"
    try:
        text = _template(tokenizer, [{"role": "user", "content": [{"type": "text", "text": probe}]}])
    except Exception:  # templates raise anything
        return False
    return probe in text and "'type'" not in text


def prompt(tokenizer: Any, conversation: Sequence[tuple[str, str]], manner: str = "auto") -> str:
    """Return the conversation as a prompt that the assistant's answer continues."""
    if tokenizer.chat_template is None or manner != "auto":
        return transcript(conversation, tokenizer.eos_token or "")[0] + "\n<|assistant|>\n"
    return _template(tokenizer, as_messages(conversation, _reads_parts(tokenizer, conversation)), True)


def _template(tokenizer: Any, messages: list, generation_prompt: bool = False) -> str:
    if not messages and not generation_prompt:
        return ""
    if not messages:
        return ""
    try:
        return tokenizer.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # templates raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the tokenizer's chat template cannot render turns of {roles}: {error}. Leave such rows out, or set "
            "data.chat_template=transcript"
        ) from error


def original_template(tokenizer: Any, messages: list, max_length: int | None):
    """Return ids and labels as the original does, or None if its rule does not apply.

    The template must mark its generations, run without an error, and leave at least one token to learn.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not ("{% generation" in template or "{%- generation" in template):
        return None
    try:
        encoded = tokenizer.inner.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=False,
            truncation=True,
            max_length=max_length,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception:  # users' templates raise anything
        return None
    ids = np.array(encoded["input_ids"], np.int32)
    mask = np.array(encoded["assistant_masks"] if "assistant_masks" in encoded else encoded["assistant_mask"], bool)
    return (ids, np.where(mask, ids, -100).astype(np.int32)) if mask.any() else None
