"""Losses of the four tasks. All in nats, in float32, means over the valid rows."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import nn
from jaxtrain.task import Loss


def row_cross_entropy(logits, labels, smoothing: float = 0.0, gamma: float = 0.0, visible=None):
    """Per-row loss [batch]. logits: [batch, class]; labels: int [batch], any value where the row does not count.

    smoothing: share of the target spread over all classes (torch's label_smoothing). gamma: focal exponent, each row
    times (1 - p)^gamma (Lin et al. 2017); 0 is plain cross-entropy. visible: bool [batch, class], False leaves a class
    out of the softmax.
    """
    if visible is not None:
        logits = jnp.where(visible, logits, jnp.finfo(jnp.float32).min)
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    labels = jnp.clip(labels, 0, logits.shape[-1] - 1)
    picked = nn.pick(log_p, labels)
    loss = -picked
    if smoothing:
        counted = jnp.ones(log_p.shape, bool) if visible is None else visible
        spread = jnp.where(counted, log_p, 0.0).sum(axis=-1) / jnp.maximum(counted.sum(axis=-1), 1)
        loss = (1 - smoothing) * loss - smoothing * spread
    return loss if gamma == 0 else loss * (1 - jnp.exp(picked)) ** gamma


def mean_over(rows, valid):
    """Mean of rows [batch] over the valid ones, 0 where there is none; invalid rows may hold anything."""
    count = jnp.maximum(valid.astype(jnp.float32).sum(), 1.0)
    return jnp.where(valid, rows, 0.0).sum() / count


def classification_loss(logits, labels, valid, row_weight=None, smoothing: float = 0.0, gamma: float = 0.0):
    """Mean over the valid rows; row_weight [batch] multiplies each row (class weights whose mean over the training
    rows is 1, so that micro-batches add up to the batch exactly)."""
    rows = row_cross_entropy(logits, labels, smoothing, gamma)
    return mean_over(rows if row_weight is None else rows * row_weight, valid)


def position_loss(logits, positions, valid, visible=None, smoothing: float = 0.0):
    """Cross-entropy over the tokens. logits: [batch, token]; positions: int [batch], negative where a row has no
    answer (it adds nothing). visible: bool [batch, token] limits the softmax to these tokens; None takes all of them,
    padding too, as the original does."""
    rows = row_cross_entropy(logits, positions, smoothing, 0.0, visible)
    return mean_over(jnp.where(positions >= 0, rows, 0.0), valid)


def span_loss(outputs, batch, visible=None, smoothing: float = 0.0):
    """(start + end) / 2, and both alone. Source: Devlin et al. 2019, sec. 4.2."""
    start = position_loss(outputs["start_logits"], batch["start_positions"], batch["valid"], visible, smoothing)
    end = position_loss(outputs["end_logits"], batch["end_positions"], batch["valid"], visible, smoothing)
    return (start + end) / 2, start, end


def combined(outputs, batch, weights, visible=None, smoothing: float = 0.0, gamma: float = 0.0) -> Loss:
    """weights.criteria * classification + weights.evidence * span, of whichever heads the outputs have.

    With one head only, the loss is that head's, unweighted.
    """
    parts = {}
    if "logits" in outputs:
        parts["criteria_loss"] = classification_loss(
            outputs["logits"], batch["labels"], batch["valid"], batch.get("row_weight"), smoothing, gamma
        )
    if "start_logits" in outputs:
        parts["evidence_loss"], _, _ = span_loss(outputs, batch, visible, smoothing)
    count = batch["valid"].astype(jnp.float32).sum()
    if len(parts) == 1:
        return Loss(next(iter(parts.values())), count)
    value = weights.criteria * parts["criteria_loss"] + weights.evidence * parts["evidence_loss"]
    return Loss(value, count, parts)


def text_tokens(batch) -> Any:
    """bool [batch, token]: where a span may lie, the tokens that the attention mask shows."""
    name = "evidence_attention_mask" if "evidence_attention_mask" in batch else "attention_mask"
    return batch[name] != 0


INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def forward(model, batch, rngs) -> dict[str, Any]:
    """The model on the texts of a batch; family base and the originals' trainer take them by the same names."""
    names = [f"{side}{name}" for side in ("", "criteria_", "evidence_") for name in INPUTS]
    return model(**{name: batch[name] for name in names if name in batch}, rngs=rngs)


def loss(model, batch, config, rngs) -> Loss:
    settings = config.loss
    given = forward(model, batch, rngs)
    visible = text_tokens(batch) if settings.mask_padding and "start_logits" in given else None
    return combined(given, batch, settings.weights, visible, settings.label_smoothing, settings.focal_gamma)


def outputs(model, batch) -> dict[str, Any]:
    """logits [batch, class], start_logits and end_logits [batch, token], whichever the model has."""
    return forward(model, batch, None)
