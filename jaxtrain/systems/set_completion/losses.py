"""Compute the completion task's loss, for batches with given inputs and for batches masked in the step."""

import jax
import jax.numpy as jnp

from jaxtrain.losses import weighted_mean
from jaxtrain.systems.set_completion.masking import PADDING, hide
from jaxtrain.task import Loss


def completion_loss(logits, targets):
    """Mean binary cross-entropy over the vocabulary, in nats, per row. logits, targets: [batch, token] -> [batch].

    Source: torch.nn.BCEWithLogitsLoss.
    """
    return (jnp.maximum(logits, 0) - logits * targets + jnp.log1p(jnp.exp(-jnp.abs(logits)))).mean(-1)


def multi_hot(ids, size: int, padding: int = PADDING):
    """float32 [batch, size]: 1 where an id of the row is; ids [batch, token] of `padding` count nowhere.

    Ids outside [0, size) count nowhere either.
    """
    hits = (ids[..., None] == jnp.arange(size)) & (ids != padding)[..., None]
    return hits.any(-2).astype(jnp.float32)


def readable(ids):
    """Which rows hold a token at all, bool [batch], and the padding mask with one place opened in those that do not.

    A set of padding alone has no softmax: such rows are computed on a made-up token and left out of the loss.
    """
    hidden = ids < 0
    present = ~hidden.all(1)
    first = jnp.arange(ids.shape[1]) == 0
    return present, jnp.where(present[:, None], hidden, hidden & ~first)


def visible_ids(batch, config, rngs):
    """Mask a batch: return the tokens the model sees, int [batch, position], PADDING elsewhere.

    `inputs` of the batch where it has them (validation, the original's datasets); else the sets in `targets` are masked
    here, anew at every step in training. Ids of <PAD> count as padding.
    """
    data = config.data
    if "inputs" in batch:
        visible = batch["inputs"]
    else:
        key = jax.random.key(config.seed) if rngs is None else rngs()
        visible = hide(batch["targets"], batch["index"], key, data.skew_factor, data.instances, null_id(config))
    return without_pad(visible, config.model.padding)


def null_id(config) -> int | None:
    """The token that stands for "nothing seen", where the data use it."""
    if not config.data.include_null:
        return None
    return config.model.vocab_size - 2 if config.data.null_token_id is None else config.data.null_token_id


def without_pad(ids, pad_token_id: int):
    return jnp.where(ids == pad_token_id, PADDING, ids)


def run_model(model, visible, weapon, rngs=None, guard: bool = True):
    """Pooled vectors [batch, hidden_dim] and logits [batch, token] of visible ids, and which rows mean something.

    guard: rows without a token are computed on a made-up one instead of giving NaN.
    """
    present, hidden = readable(visible) if guard else (jnp.ones(len(visible), bool), visible < 0)
    tokens = jnp.where(visible < 0, model.ability_embedding.padding_idx or 0, visible).astype(jnp.int32)
    pooled = model.pooled(tokens, weapon.astype(jnp.int32), hidden, rngs)
    return pooled, model.output_layer(pooled), present


def loss(model, batch, config, rngs) -> Loss:
    """Binary cross-entropy in nats per token of the vocabulary, over all tokens of the full set, visible ones too.

    Rows that show nothing (a set of one token without <NULL>) count nowhere; under compat: original they are NaN.
    """
    visible = visible_ids(batch, config, rngs)
    guard = config.compat != "original"
    _, logits, present = run_model(model, visible, batch["weapon"], rngs, guard)
    targets = multi_hot(without_pad(batch["targets"], config.model.padding), logits.shape[1])
    value, weight = weighted_mean(completion_loss(logits.astype(jnp.float32), targets), batch["valid"] & present)
    return Loss(value, weight)


def outputs(model, batch):
    """logits [batch, token] and pooled [batch, hidden_dim] of the sets as they stand in the batch."""
    visible = shown(batch, model.ability_embedding.padding_idx)
    pooled, logits, _ = run_model(model, visible, batch["weapon"])
    return {"logits": logits, "pooled": pooled}


def shown(batch, pad_token_id: int | None):
    """The ids that a batch shows without masking anything."""
    ids = batch["inputs"] if "inputs" in batch else batch["targets"]
    return ids if pad_token_id is None else without_pad(ids, pad_token_id)
