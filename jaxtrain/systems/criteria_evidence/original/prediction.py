"""Predict with a torch model for texts; the results have the fields of the original's predict()."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import decoding, tokenization
from torch_bridge.datasets import to_numpy

NAMES = {"criteria": ("logits",), "evidence": ("start_logits", "end_logits")}


def predict(
    architecture: str,
    model: torch.nn.Module,
    tokenizer: Any,
    texts: Sequence[Any],
    max_length: int = 256,
    evidence_max_length: int = 512,
) -> list[dict[str, Any]]:
    """Return one dict per text.

    criteria: prediction, confidence, probabilities. evidence: start_index, end_index, predicted_span. share and joint:
    criteria_prediction, criteria_confidence, criteria_probabilities, span_start, span_end, predicted_span. texts:
    strings; for joint, mappings with sentence and context. tokenizer: a fast one of transformers, else UserError.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"tokenizer: {type(tokenizer).__name__}, wanted a fast tokenizer of transformers")
    inner = tokenization.Tokenizer(type(backend).from_str(backend.to_str()), tokenizer.pad_token, "given")
    names = NAMES.get(architecture, ("logits", "start_logits", "end_logits"))
    device = next(model.parameters()).device
    was = model.training

    @torch.no_grad()
    def run(batch):
        known = {key: torch.from_numpy(value).long().to(device) for key, value in batch.items()}
        out = model(**{key: value for key, value in known.items() if _reads(tokenizer, key)})
        values = list(out.values()) if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,)
        return dict(zip(names, map(to_numpy, values), strict=True))

    model.eval()
    try:
        return decoding.predict(architecture, run, inner, texts, max_length, evidence_max_length)
    finally:
        model.train(was)


def _reads(tokenizer: Any, key: str) -> bool:
    """Return False for token_type_ids if the tokenizer has none (RoBERTa: its model knows only one type)."""
    return not key.endswith("token_type_ids") or "token_type_ids" in tokenizer.model_input_names
