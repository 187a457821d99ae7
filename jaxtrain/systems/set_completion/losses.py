"""Loss of the completion task, for batches that are already masked and for batches masked in the step."""

import jax
import jax.numpy as jnp

from jaxtrain.losses import weighted_mean
from jaxtrain.systems.set_completion.masking import PADDING, hide
from jaxtrain.task import Loss


def completion_loss(logits, targets):
    """Return each row's mean binary cross-entropy over the vocabulary, in nats, [batch]; inputs: [batch, token].

    Source: torch.nn.BCEWithLogitsLoss.
    """
    return (jnp.maximum(logits, 0) - logits * targets + jnp.log1p(jnp.exp(-jnp.abs(logits)))).mean(-1)


def multi_hot(ids, size: int, padding: int = PADDING):
    """Return float32 [batch, size] with 1 for each id of ids [batch, token]; `padding` is ignored.

    Ids outside [0, size) are ignored too.
    """
    hits = (ids[..., None] == jnp.arange(size)) & (ids != padding)[..., None]
    return hits.any(-2).astype(jnp.float32)


def readable(ids):
    """Return bool [batch], True for rows with a token, and the padding mask; it shows the first position of empty rows.

    A softmax over padding alone is undefined, so empty rows are computed on a dummy token and excluded from the loss.
    """
    hidden = ids < 0
    present = ~hidden.all(1)
    first = jnp.arange(ids.shape[1]) == 0
    return present, jnp.where(present[:, None], hidden, hidden & ~first)


def visible_ids(batch, config, rngs):
    """Return the tokens that the model sees, int [batch, position], PADDING elsewhere.

    They are the batch's `inputs` if it has them (validation, the original's datasets). Otherwise the sets in `targets`
    are masked here, in training anew at every step. <PAD> ids become PADDING.
    """
    data = config.data
    if "inputs" in batch:
        visible = batch["inputs"]
    else:
        key = jax.random.key(config.seed) if rngs is None else rngs()
        visible = hide(batch["targets"], batch["index"], key, data.skew_factor, data.instances, null_id(config))
    return without_pad(visible, config.model.padding)


def null_id(config) -> int | None:
    """Return the id of <NULL>, which stands for an empty input; None without data.include_null."""
    if not config.data.include_null:
        return None
    return config.model.vocab_size - 2 if config.data.null_token_id is None else config.data.null_token_id


def without_pad(ids, pad_token_id: int):
    return jnp.where(ids == pad_token_id, PADDING, ids)


def run_model(model, visible, weapon, rngs=None, guard: bool = True):
    """Return pooled vectors [batch, hidden_dim], logits [batch, token], and bool [batch], True for rows with a token.

    guard: compute rows without a token on a dummy one instead of giving NaN; without it all rows are True.
    """
    present, hidden = readable(visible) if guard else (jnp.ones(len(visible), bool), visible < 0)
    tokens = jnp.where(visible < 0, model.ability_embedding.padding_idx or 0, visible).astype(jnp.int32)
    pooled = model.pooled(tokens, weapon.astype(jnp.int32), hidden, rngs)
    return pooled, model.output_layer(pooled), present


def loss(model, batch, config, rngs) -> Loss:
    """Return the binary cross-entropy in nats per vocabulary token; targets are the full sets, visible tokens included.

    Rows without a visible token (a set of one token without <NULL>) are excluded; with compat: original they are NaN.
    """
    visible = visible_ids(batch, config, rngs)
    guard = config.compat != "original"
    _, logits, present = run_model(model, visible, batch["weapon"], rngs, guard)
    targets = multi_hot(without_pad(batch["targets"], config.model.padding), logits.shape[1])
    value, weight = weighted_mean(completion_loss(logits.astype(jnp.float32), targets), batch["valid"] & present)
    return Loss(value, weight)


def outputs(model, batch):
    """Return logits [batch, token] and pooled [batch, hidden_dim] of the batch's sets, without masking them."""
    visible = shown(batch, model.ability_embedding.padding_idx)
    pooled, logits, _ = run_model(model, visible, batch["weapon"])
    return {"logits": logits, "pooled": pooled}


def shown(batch, pad_token_id: int | None):
    """Return the batch's `inputs`, or its `targets` if it has none, with <PAD> ids as PADDING."""
    ids = batch["inputs"] if "inputs" in batch else batch["targets"]
    return ids if pad_token_id is None else without_pad(ids, pad_token_id)
