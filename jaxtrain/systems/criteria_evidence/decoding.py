"""Turn logits into answers: classes with probabilities, and spans as text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.systems.criteria_evidence.examples import padded
from jaxtrain.systems.criteria_evidence.metrics import softmax
from jaxtrain.systems.criteria_evidence.tokenization import Tokenizer

Model = Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]  # padded tensors -> logits, start_logits, end_logits


def span_text(context: str, offsets: np.ndarray, start: int, end: int) -> tuple[int, int, str]:
    """Return the characters [from, to) and the text of tokens start..end; an end before the start becomes the start.

    Special tokens and padding have the offsets (0, 0), so a span that ends on one is empty.
    """
    end = max(start, end)
    offset = lambda token: offsets[token] if token < len(offsets) else (0, 0)
    first, last = int(offset(start)[0]), int(offset(end)[1])
    return first, last, context[first:last] if last > first else ""


def class_fields(logits) -> list[dict[str, Any]]:
    """Return prediction, confidence and probabilities of every row."""
    probabilities = softmax(logits)
    best = probabilities.argmax(axis=-1)
    return [
        {"prediction": int(k), "confidence": float(p[k]), "probabilities": p.tolist()}
        for k, p in zip(best, probabilities, strict=True)
    ]


def span_fields(contexts: Sequence[str], encoded, start_logits, end_logits) -> list[tuple[int, int, str]]:
    starts, ends = np.argmax(start_logits, axis=-1), np.argmax(end_logits, axis=-1)
    return [
        span_text(context, encoded.row(i)["offsets"], int(starts[i]), int(ends[i]))
        for i, context in enumerate(contexts)
    ]


def predict(
    architecture: str,
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[Any],
    max_length: int = 256,
    evidence_max_length: int = 512,
) -> list[dict[str, Any]]:
    """Return one dict per text with the fields of the original's predict() for that architecture.

    texts: strings; for joint, mappings with "sentence" and "context". Start and end are independent argmaxes over the
    padded length. The text of an empty span is "".
    """
    if not len(texts):
        return []
    if architecture == "joint":
        return _joint(model, tokenizer, texts, max_length, evidence_max_length)
    longest = max_length if architecture == "criteria" else evidence_max_length
    encoded = tokenizer.encode(list(texts), None, longest)
    outputs = model(padded(encoded, range(len(texts)), longest, tokenizer.pad_id))
    if architecture == "criteria":
        fields = class_fields(outputs["logits"])
        return [{"text": text, **field} for text, field in zip(texts, fields, strict=True)]
    spans = span_fields(texts, encoded, outputs["start_logits"], outputs["end_logits"])
    if architecture == "evidence":
        return [
            {"context": context, "start_index": start, "end_index": end, "predicted_span": text}
            for context, (start, end, text) in zip(texts, spans, strict=True)
        ]
    both = zip(texts, class_fields(outputs["logits"]), spans, strict=True)
    return [{"context": context, **_joined(field, span)} for context, field, span in both]


def _joint(model: Model, tokenizer: Tokenizer, texts, max_length: int, evidence_max_length: int) -> list[dict]:
    sentences, contexts = ([text[key] for text in texts] for key in ("sentence", "context"))
    first, second = tokenizer.encode(sentences, None, max_length), tokenizer.encode(contexts, None, evidence_max_length)
    rows, batch = range(len(texts)), {}
    for prefix, encoded, width in (("criteria_", first, max_length), ("evidence_", second, evidence_max_length)):
        columns = padded(encoded, rows, width, tokenizer.pad_id)
        batch |= {f"{prefix}{name}": column for name, column in columns.items()}
    outputs = model(batch)
    spans = span_fields(contexts, second, outputs["start_logits"], outputs["end_logits"])
    spans = [span if span[2] else (0, 0, "") for span in spans]  # only the original's joint engine does this
    both = zip(sentences, contexts, class_fields(outputs["logits"]), spans, strict=True)
    return [{"sentence": s, "context": c, **_joined(field, span)} for s, c, field, span in both]


def _joined(field: Mapping[str, Any], span: tuple[int, int, str]) -> dict[str, Any]:
    named = {f"criteria_{key}": value for key, value in field.items()}
    return named | {"span_start": span[0], "span_end": span[1], "predicted_span": span[2]}
