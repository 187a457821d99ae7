"""Predict with a torch model for texts; the results have the fields of the original's predict()."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import decoding, tokenization
from torch_bridge.datasets import to_numpy

NAMES = {"criteria": ("logits",), "evidence": ("start_logits", "end_logits")}


def predict(
    texts: Sequence[str],
    config: Mapping[str, Any],
    *,
    checkpoint_name: str | None = None,
    batch_size: int = 32,
) -> list[dict[str, Any]]:
    """Return prediction, confidence and probabilities of each text, from a criteria model's checkpoint.

    config: model.name (a hub id or folder), model.head and model.task (`head_cfg` and `task_cfg` of Model),
    dataset.max_length (256), and output_dir (artifacts/criteria), which holds checkpoint_name, by default
    best_model.pt with a `model_state_dict`. Raises FileNotFoundError if that is not there.
    """
    from transformers import AutoTokenizer

    from jaxtrain.systems.criteria_evidence.original.architectures import Criteria
    from jaxtrain.systems.criteria_evidence.original.datasets import MissingFile

    section, data = config.get("model") or {}, config.get("dataset") or {}
    path = pathlib.Path(config.get("output_dir", "artifacts/criteria")) / (checkpoint_name or "best_model.pt")
    if not path.is_file():
        raise MissingFile(f"{path}: no such checkpoint; output_dir and checkpoint_name name it")
    name = section.get("name", section.get("pretrained_model", "bert-base-uncased"))
    model = Criteria(name, head_cfg=section.get("head"), task_cfg=section.get("task"))
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model_state_dict"])
    tokenizer, length = AutoTokenizer.from_pretrained(name), data.get("max_length", 256)
    parts = [list(texts[at : at + batch_size]) for at in range(0, len(texts), batch_size)]
    return [row for part in parts for row in predict_texts("criteria", model, tokenizer, part, length)]


def predict_texts(
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
