"""Conversations: the four shapes they come in, templates, and which characters the assistant said."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ASSISTANT = ("assistant", "model", "gpt", "bot")
Span = tuple[int, int]


def messages_of(row: Mapping[str, Any]) -> list | None:
    """The turns of a row: `messages`, else `conversations`, else `prompt` and `response`; None for a plain text."""
    for column in ("messages", "conversations"):
        if column in row:
            return list(row[column] or [])
    if "prompt" in row and "response" in row:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    return None


def turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(role, text) of each turn; `from` and `value` are other names of `role` and `content`."""
    return [
        (str(turn.get("role") or turn.get("from") or "unknown"), str(turn.get("content") or turn.get("value") or ""))
        for turn in messages
    ]


def is_assistant(role: str) -> bool:
    return role.strip().lower() in ASSISTANT


def overlaps(start: int, end: int, spans: Sequence[Span]) -> bool:
    """Return True if the characters [start, end), which must not be empty, overlap one of the spans."""
    return end > start and any(start < last and end > first for first, last in spans)


def transcript(conversation: Sequence[tuple[str, str]], end: str = "") -> tuple[str, list[Span]]:
    """`<|role|>` lines and contents, and the spans of what the assistant said; `end` follows each of its turns."""
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
    """A conversation as text, by the tokenizer's own template where it has one (manner "auto"), and the spans to learn:
    each assistant turn with the marker that ends it, as far as the template puts it there."""
    if tokenizer.chat_template is None or manner != "auto":
        return transcript(conversation, tokenizer.eos_token or "")
    messages = as_messages(conversation)
    text = _template(tokenizer, messages)
    spans, place = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = _template(tokenizer, messages[:i], True), _template(tokenizer, messages[: i + 1])
        if text.startswith(before) and text.startswith(after.rstrip("\n")):
            spans.append((len(before), len(after.rstrip("\n"))))
        else:  # a template that rewrites earlier turns: the content alone
            place = text.find(message["content"], place)
            if place >= 0 and message["content"]:
                spans.append((place, place + len(message["content"])))
        place = spans[-1][1] if spans else 0
    return text, spans


def as_messages(conversation: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Turns under the roles that templates know."""
    names = {"human": "user", "unknown": "user"}
    return [
        {"role": "assistant" if is_assistant(role) else names.get(role.lower(), role.lower()), "content": content}
        for role, content in conversation
    ]


def prompt(tokenizer: Any, conversation: Sequence[tuple[str, str]], manner: str = "auto") -> str:
    """The text after which the assistant is to answer."""
    if tokenizer.chat_template is None or manner != "auto":
        return transcript(conversation, tokenizer.eos_token or "")[0] + "\n<|assistant|>\n"
    return _template(tokenizer, as_messages(conversation), True)


def _template(tokenizer: Any, messages: list, generation_prompt: bool = False) -> str:
    if not messages and not generation_prompt:
        return ""
    if not messages:
        return ""
    return tokenizer.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)


def original_template(tokenizer: Any, messages: list, max_length: int | None):
    """ids and labels by the original's rule: only a template that marks its generations is applied, and only where it
    applies without an error and leaves something to learn; None otherwise."""
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
    except Exception:  # whatever a user's template raises
        return None
    ids = np.array(given["input_ids"], np.int32)
    mask = np.array(given["assistant_masks"] if "assistant_masks" in given else given["assistant_mask"], bool)
    return (ids, np.where(mask, ids, -100).astype(np.int32)) if mask.any() else None
