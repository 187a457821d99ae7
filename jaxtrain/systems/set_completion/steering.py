"""Read and edit the autoencoder's features between the pooled vector and the output layer of a frozen model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.nn.rows import pick
from jaxtrain.systems.set_completion.model import SetCompletionModel
from jaxtrain.systems.set_completion.sae import SparseAutoencoder

MODES = ("reconstruct", "no_change", "bypass")


class Steered(NamedTuple):
    """Result of `steer`. logits: [batch, token]. Unless bypassed: pooled [batch, width], features before and after the
    activation [batch, hidden_dim], and for mode "reconstruct" the edited reconstruction [batch, width]."""

    logits: jax.Array
    pooled: jax.Array | None = None
    h_pre: jax.Array | None = None
    h_post: jax.Array | None = None
    reconstruction: jax.Array | None = None


def steer(
    model: SetCompletionModel,
    sae: SparseAutoencoder,
    ability_tokens,
    weapon_token,
    key_padding_mask=None,
    *,
    feature: int | None = None,
    value: float | None = None,
    mode: str = "reconstruct",
) -> Steered:
    """Run the model with the SAE before its output layer.

    mode: "reconstruct" passes the reconstruction to the output layer, with feature `feature` set to `value` in every
    row if both are given; "no_change" only records the features; "bypass" does not run the SAE. Raises UserError for an
    unknown mode or a feature out of range.
    """
    if mode not in MODES:
        raise UserError(f"steer: mode {mode!r} is unknown, wanted one of {', '.join(MODES)}")
    if feature is not None and not 0 <= feature < sae.hidden_dim:
        raise UserError(f"steer: feature {feature} is out of range, this SAE has features 0 to {sae.hidden_dim - 1}")
    pooled = model.pooled(ability_tokens, weapon_token, key_padding_mask)
    if mode == "bypass":
        return Steered(model.output_layer(pooled))
    h_pre, h_post = sae.encode(pooled)
    if mode == "no_change":
        return Steered(model.output_layer(pooled), pooled, h_pre, h_post)
    edited = h_post if feature is None or value is None else h_post.at[:, feature].set(value)
    reconstruction = sae.decode(edited)
    return Steered(model.output_layer(reconstruction), pooled, h_pre, h_post, reconstruction)


def change(model, sae, ability_tokens, weapon_token, key_padding_mask=None, *, feature: int, value: float):
    """Return the change of every token's probability if a feature is set to `value`, [batch, token].

    It is relative to the unedited reconstruction, so the SAE's reconstruction error cancels.
    """
    arguments = (model, sae, ability_tokens, weapon_token, key_padding_mask)
    before = jax.nn.sigmoid(steer(*arguments).logits)
    return jax.nn.sigmoid(steer(*arguments, feature=feature, value=value).logits) - before


def reconstruction_impact(logits, reconstructed, first_targets, valid):
    """Return sums over rows that measure how replacing the pooled vector by its reconstruction changes the logits.

    logits, reconstructed: [batch, token]. first_targets: int [batch], the id that the original uses as the class label.
    valid: bool [batch]. To get means, divide by `rows` (cross-entropies, top-1 values and match rate by `labels`).
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(reconstructed)
    norms = jnp.linalg.norm(logits, axis=1) * jnp.linalg.norm(reconstructed, axis=1)
    rows = {
        "logit_mse": jnp.square(logits - reconstructed).mean(1),
        "logit_cosine_similarity": (logits * reconstructed).sum(1) / jnp.maximum(norms, 1e-8),
        "logit_kl_divergence": (jnp.exp(log_p) * (log_p - log_q)).sum(1),
        "rows": jnp.ones(len(logits)),
    }
    label = jnp.maximum(first_targets, 0)[:, None]
    top, top_reconstructed = logits.argmax(1), reconstructed.argmax(1)
    labelled = {
        "original_ce_loss": -pick(log_p, label[:, 0]),
        "reconstructed_ce_loss": -pick(log_q, label[:, 0]),
        "original_top1_accuracy": top == label[:, 0],
        "reconstructed_top1_accuracy": top_reconstructed == label[:, 0],
        "top1_prediction_match_rate": top == top_reconstructed,
        "labels": jnp.ones(len(logits)),
    }
    has_label = valid & (first_targets >= 0)
    sums = {name: jnp.where(valid, value, 0).sum() for name, value in rows.items()}
    return sums | {name: jnp.where(has_label, value, 0).sum() for name, value in labelled.items()}
