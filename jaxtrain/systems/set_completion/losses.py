"""What the completion task minimises, for batches whose inputs are given and for those masked in the step."""

import jax
import jax.numpy as jnp

PADDING = -1  # in id columns of a batch: no token here


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


def weighted_mean(values, weights):
    """Mean of values [row] over weights [row] >= 0, and the sum of the weights; 0 where that is 0."""
    weight = weights.sum()
    total = jnp.where(weights > 0, values * weights, 0.0).sum()
    return total / jnp.maximum(weight, 1e-12), weight


def readable(ids):
    """Which rows hold a token at all, bool [batch], and the padding mask with one place opened in those that do not.

    A set of padding alone has no softmax: such rows are computed on a made-up token and left out of the loss.
    """
    hidden = ids < 0
    present = ~hidden.all(1)
    first = jnp.arange(ids.shape[1]) == 0
    return present, jnp.where(present[:, None], hidden, hidden & ~first)


def run_model(model, ids, weapon, pad_token_id: int, rngs=None):
    """Logits [batch, token] of ids [batch, position] (PADDING = no token), and which rows mean something.

    pad_token_id: the vocabulary's own padding id, which stands in the empty places.
    """
    present, hidden = readable(ids)
    tokens = jnp.where(ids < 0, pad_token_id, ids).astype(jnp.int32)
    return model(tokens, weapon, hidden, rngs), present


def sigmoid_probabilities(logits):
    return jax.nn.sigmoid(logits.astype(jnp.float32))
