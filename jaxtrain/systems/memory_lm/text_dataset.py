"""Turn rows of a dataset into token ids and labels: by the original's rules, or with chat templates and end tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import chat
from jaxtrain.systems.memory_lm.tokenizers import Tokens

IGNORE = -100
MODES = ("pretraining", "instruction_finetuning")


class Encoder:
    """Encoder of one row (a mapping of columns) into tokens.

    max_length: longer texts are truncated to so many tokens; None keeps them whole. original: use the torch original's
    rules (transcripts without an end token; a chat template only if it marks its generations). append_eos,
    chat_template: see the section `data`. Raises UserError for an unknown training_mode or a missing end token.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int | None,
        training_mode: str = "pretraining",
        text_field: str | Sequence[str] = "text",
        *,
        original: bool = False,
        append_eos: bool = True,
        chat_template: str = "auto",
    ):
        if training_mode not in MODES:
            raise UserError(f"data.training_mode: {training_mode!r}, wanted one of {', '.join(MODES)}")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.training_mode = training_mode
        self.text_field = text_field
        self.original = original
        self.append_eos = append_eos and not original
        if self.append_eos and tokenizer.eos_token_id is None:
            raise UserError(
                f"data.append_eos: the tokenizer {tokenizer.name} has no end token; give it one, or append_eos=false"
            )
        self.chat_template = chat_template

    def encode(self, row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels, int32 [length]; labels are not shifted, and IGNORE for tokens that are not learned."""
        if self.training_mode == "pretraining":
            return self._all(self._text(row))
        messages = chat.messages_of(row)
        if messages is not None:
            return self._chat(messages)
        fields = [self.text_field] if isinstance(self.text_field, str) else list(self.text_field)
        if any(field in row for field in fields):
            return self._all(self._text(row))
        raise UserError(
            f"the row has the columns {', '.join(row)}; instruction tuning wants messages, conversations, prompt and "
            f"response, or data.text_field ({self.text_field})"
        )

    def padded(self, row: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return input_ids, attention_mask and labels, int32 [max_length], padded on the tokenizer's side."""
        ids, labels = self.encode(row)
        missing = self.max_length - len(ids)
        sides = (missing, 0) if self.tokenizer.padding_side == "left" else (0, missing)
        return {
            "input_ids": np.pad(ids, sides, constant_values=self.tokenizer.pad_token_id) if missing else ids,
            "attention_mask": np.pad(np.ones(len(ids), np.int32), sides),
            "labels": np.pad(labels, sides, constant_values=IGNORE),
        }

    def _text(self, row: Mapping[str, Any]) -> str:
        def column(name: str) -> str:
            value = row.get(name, "")
            return "" if value is None and not self.original else str(value)

        if isinstance(self.text_field, str):
            return column(self.text_field)
        parts = [column(field) for field in self.text_field]
        return " ".join(part for part in parts if part or self.original)

    def _all(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text of which every token is learned, followed by the end token with append_eos."""
        room = self.max_length
        tokens = self.tokenizer.encode(text, room)
        ids = np.array(tokens.ids, np.int32)
        if self.append_eos and len(ids) and (room is None or len(ids) < room):
            ids = np.append(ids, np.int32(self.tokenizer.eos_token_id))
        return ids, ids.copy()

    def _chat(self, messages: list) -> tuple[np.ndarray, np.ndarray]:
        if self.original:
            marked = chat.original_template(self.tokenizer, messages, self.max_length)
            if marked is not None:
                return marked
            text, spans = chat.transcript(chat.turns(messages))
            return self._spans(text, spans, special=True)
        conversation = chat.turns(messages)
        text, spans = chat.render(self.tokenizer, conversation, self.chat_template)
        templated = self.tokenizer.chat_template is not None and self.chat_template == "auto"
        return self._spans(text, spans, special=not templated)

    def _spans(self, text: str, spans: list[tuple[int, int]], special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text of which the tokens that overlap a span are learned; all tokens if there is no span."""
        tokens: Tokens = self.tokenizer.encode(text, self.max_length, special=special)
        ids = np.array(tokens.ids, np.int32)
        if tokens.offsets is None:
            return ids, ids.copy()
        learned = np.array([chat.overlaps(start, end, spans) for start, end in tokens.offsets], bool)
        if not learned.any() and not spans:
            learned[:] = True
        return ids, np.where(learned, ids, IGNORE).astype(np.int32)
