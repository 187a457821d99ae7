"""Metrics of the four tasks from the models' outputs."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.criteria_evidence import losses, scores
from jaxtrain.task import Statistics


def text_tokens(batch) -> Any:
    """bool [batch, token]: where a span may lie, the tokens that the attention mask shows."""
    name = "evidence_attention_mask" if "evidence_attention_mask" in batch else "attention_mask"
    return batch[name] != 0


def decode(start_logits, end_logits, decode, visible):
    """Predicted first and last token [batch] of every row.

    decode.valid_only: the best pair with start <= end < start + max_tokens inside `visible`; else both maxima on their
    own, over padding too, as the original does (the end may lie before the start).
    """
    if not decode.valid_only:
        return jnp.argmax(start_logits, axis=-1), jnp.argmax(end_logits, axis=-1)
    tokens = start_logits.shape[-1]
    lowest = jnp.finfo(jnp.float32).min
    start_logits, end_logits = (jnp.where(visible, x.astype(jnp.float32), lowest) for x in (start_logits, end_logits))
    length = jnp.arange(tokens)[None, :] - jnp.arange(tokens)[:, None]
    allowed = (length >= 0) & (length < decode.max_tokens) & visible[:, :, None] & visible[:, None, :]
    both = jnp.where(allowed, start_logits[:, :, None] + end_logits[:, None, :], lowest)
    best = jnp.argmax(both.reshape(len(both), -1), axis=-1)
    return best // tokens, best % tokens


def eval_statistics(outputs: Mapping[str, Any], batch: Mapping[str, Any], config: Any) -> Statistics:
    """Rows: class probabilities and labels, predicted and true span ends; sums: for the original's epoch loss."""
    rows: dict[str, Any] = {}
    if "logits" in outputs:
        shifted = jnp.asarray(outputs["logits"], jnp.float32)
        shifted = jnp.exp(shifted - shifted.max(axis=-1, keepdims=True))
        rows = {"probabilities": shifted / shifted.sum(axis=-1, keepdims=True), "labels": batch["labels"]}
    if "start_logits" in outputs:
        visible = text_tokens(batch)
        logits = (jnp.asarray(outputs["start_logits"]), jnp.asarray(outputs["end_logits"]))
        rows["starts"], rows["ends"] = decode(*logits, config.decode, jnp.asarray(visible))
        rows["true_starts"], rows["true_ends"] = batch["start_positions"], batch["end_positions"]
    sums = {}
    if config.compat == "original":  # the mean of batch means, however short the last batch is
        arrays = {key: jnp.asarray(value) for key, value in batch.items()}
        value, weight, _ = losses.combined(outputs, arrays, config.loss.weights)
        sums = {"batch_loss": jnp.where(weight > 0, value, 0.0), "batches": (weight > 0).astype(jnp.float32)}
    return Statistics(sums, rows)


def compute(sums: Mapping[str, Any], rows: Mapping[str, np.ndarray], config: Any) -> dict[str, float]:
    """criteria: accuracy, f1_*, precision_macro, recall_macro, auroc. evidence: start_accuracy, end_accuracy, span_em,
    span_f1. Both together: the same with the prefixes criteria_ and evidence_, and joint_score."""
    classes, spans = {}, {}
    if "labels" in rows:
        probabilities = rows["probabilities"]
        found = scores.classification_scores(rows["labels"], probabilities.argmax(axis=-1), probabilities)
        classes = {key: float("nan") if value is None else value for key, value in found.items()}
    if "starts" in rows:
        known = rows["true_starts"] >= 0  # rows kept for their label alone have no span
        positions = [rows[name][known] for name in ("starts", "ends", "true_starts", "true_ends")]
        spans = scores.span_scores(*positions) | {"span_f1": scores.span_f1(*positions)}
    own = {"loss": float(sums["batch_loss"] / sums["batches"])} if float(sums.get("batches", 0)) else {}
    if not (classes and spans):
        return own | classes | spans
    classes["f1"] = classes.pop("f1_binary")
    return own | scores.combined_scores(classes, spans)
