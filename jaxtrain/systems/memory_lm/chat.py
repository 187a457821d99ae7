"""Read conversations in their four formats, render them with chat templates, and find the assistant's text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

ASSISTANT = ("assistant", "model", "gpt", "bot")
Span = tuple[int, int]


def messages_of(row: Mapping[str, Any]) -> list | None:
    """Return a row's turns: `messages`, else `conversations`, else `prompt` and `response`; None if it has none."""
    for column in ("messages", "conversations"):
        if column in row:
            return list(row[column] or [])
    if "prompt" in row and "response" in row:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    return None


def turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (role, text) of each turn; `from` and `value` are accepted for `role` and `content`."""
    return [
        (
            str(turn.get("role") or turn.get("from") or "unknown"),
            content(turn.get("content") or turn.get("value") or ""),
        )
        for turn in messages
    ]


class Parts(str):
    """Text of a turn that was given as a list of parts; `parts` keeps the list for templates that read it."""

    parts: list[dict[str, str]]


def content(value: Any) -> str:
    """Return the text of a turn: a string, or a list of parts `{"type": "text", "text": ...}` (or strings), joined.

    Raises UserError for a part that is not text.
    """
    if not isinstance(value, (list, tuple)):
        return str(value)
    texts = [part if isinstance(part, str) else part.get("text") for part in value]
    for part, text in zip(value, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"a chat turn has a part of type {kind}; this model reads text only: leave such rows out")
    joined = Parts("".join(texts))
    joined.parts = [{"type": "text", "text": text} for text in texts]
    return joined


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
    spans, place = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = _template(tokenizer, messages[:i], True), _template(tokenizer, messages[: i + 1])
        if text.startswith(before) and text.startswith(after.rstrip("\n")):
            spans.append((len(before), len(after.rstrip("\n"))))
        else:  # the template rewrites earlier turns: learn the content only
            said = conversation[i][1]
            place = text.find(said, place)
            if place >= 0 and said:
                spans.append((place, place + len(said)))
        place = spans[-1][1] if spans else 0
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
    return tokenizer.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)


def original_template(tokenizer: Any, messages: list, max_length: int | None):
    """Return ids and labels as the original does, or None if its rule does not apply.

    The template must mark its generations, run without an error, and leave at least one token to learn.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not ("{% generation" in template or "{%- generation" in template):
        return None
    try:
        given = tokenizer.inner.apply_chat_template(
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
    ids = np.array(given["input_ids"], np.int32)
    mask = np.array(given["assistant_masks"] if "assistant_masks" in given else given["assistant_mask"], bool)
    return (ids, np.where(mask, ids, -100).astype(np.int32)) if mask.any() else None
