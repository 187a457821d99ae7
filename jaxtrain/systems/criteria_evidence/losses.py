"""Losses of the four tasks: in nats, in float32, averaged over the valid rows."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import nn
from jaxtrain.task import Loss


def row_cross_entropy(logits, labels, smoothing: float = 0.0, gamma: float = 0.0, visible=None):
    """Return the loss of each row, [batch]. logits: [batch, class]; labels: int [batch], any value in invalid rows.

    smoothing: share of the target spread over all classes (torch's label_smoothing). gamma: focal exponent, each row is
    multiplied by (1 - p)^gamma (Lin et al. 2017); 0 is plain cross-entropy. visible: bool [batch, class], False
    excludes a class from the softmax.
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
    """Return the mean of the valid rows [batch], 0 if there are none; invalid rows may hold anything."""
    count = jnp.maximum(valid.astype(jnp.float32).sum(), 1.0)
    return jnp.where(valid, rows, 0.0).sum() / count


def classification_loss(logits, labels, valid, row_weight=None, smoothing: float = 0.0, gamma: float = 0.0):
    """Return the mean loss over the valid rows; row_weight [batch] multiplies each row's loss.

    The weights are class weights with mean 1 over the training rows. The divisor is the number of rows, not the sum of
    weights, so micro-batches add up to the batch exactly.
    """
    rows = row_cross_entropy(logits, labels, smoothing, gamma)
    return mean_over(rows if row_weight is None else rows * row_weight, valid)


def position_loss(logits, positions, valid, visible=None, smoothing: float = 0.0):
    """Return the mean cross-entropy over the tokens. logits: [batch, token].

    positions: int [batch], negative if a row has no answer (its loss is 0). visible: bool [batch, token] limits the
    softmax to these tokens; None uses all, padding included, as the original does.
    """
    rows = row_cross_entropy(logits, positions, smoothing, 0.0, visible)
    return mean_over(jnp.where(positions >= 0, rows, 0.0), valid)


def span_loss(outputs, batch, visible=None, smoothing: float = 0.0):
    """Return (start + end) / 2, the start loss and the end loss. Source: Devlin et al. 2019, sec. 4.2."""
    start = position_loss(outputs["start_logits"], batch["start_positions"], batch["valid"], visible, smoothing)
    end = position_loss(outputs["end_logits"], batch["end_positions"], batch["valid"], visible, smoothing)
    return (start + end) / 2, start, end


def combined(outputs, batch, weights, visible=None, smoothing: float = 0.0, gamma: float = 0.0) -> Loss:
    """Return weights.criteria * classification loss + weights.evidence * span loss.

    If the outputs have one head only, the loss is that head's, unweighted.
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
    """Return bool [batch, token]: the tokens that a span may contain, which are those the attention mask shows."""
    name = "evidence_attention_mask" if "evidence_attention_mask" in batch else "attention_mask"
    return batch[name] != 0


INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def forward(model, batch, rngs) -> dict[str, Any]:
    """Call the model with the batch's text tensors by name; all model families use the same names."""
    names = [f"{side}{name}" for side in ("", "criteria_", "evidence_") for name in INPUTS]
    return model(**{name: batch[name] for name in names if name in batch}, rngs=rngs)


def loss(model, batch, config, rngs) -> Loss:
    settings = config.loss
    predicted = forward(model, batch, rngs)
    visible = text_tokens(batch) if settings.mask_padding and "start_logits" in predicted else None
    return combined(predicted, batch, settings.weights, visible, settings.label_smoothing, settings.focal_gamma)


def outputs(model, batch) -> dict[str, Any]:
    """Return logits [batch, class] and start_logits, end_logits [batch, token], as far as the model has them."""
    return forward(model, batch, None)
