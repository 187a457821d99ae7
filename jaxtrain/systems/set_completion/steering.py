"""Reading and editing the features between the pooled vector and the output layer of a frozen model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.nn.rows import pick
from jaxtrain.systems.set_completion.model import SetCompletionModel
from jaxtrain.systems.set_completion.sae import SparseAutoencoder

MODES = ("reconstruct", "no_change", "bypass")


class Steered(NamedTuple):
    """logits [batch, token]; in modes that look: pooled [batch, width], features before and after the activation
    [batch, hidden_dim], and the edited reconstruction [batch, width] where it was used."""

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
    """Run the model with the SAE in front of its output layer.

    mode: "reconstruct" sends the reconstruction on, with feature number `feature` set to `value` for every row if
    both are given; "no_change" only looks; "bypass" does neither. Raises UserError for a feature the SAE lacks.
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
    """Change of every token's probability when a feature is set to `value`, [batch, token]: against the unedited
    reconstruction, so that the SAE's own error cancels."""
    arguments = (model, sae, ability_tokens, weapon_token, key_padding_mask)
    before = jax.nn.sigmoid(steer(*arguments).logits)
    return jax.nn.sigmoid(steer(*arguments, feature=feature, value=value).logits) - before


def reconstruction_impact(logits, reconstructed, first_targets, valid):
    """Sums over rows of what replacing the pooled vector by its reconstruction does to the logits.

    logits, reconstructed: [batch, token]. first_targets: int [batch], the id that the original takes as "the" class.
    valid: bool [batch]. Gives sums by name; divide by `rows` (`labels` for the last five).
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
