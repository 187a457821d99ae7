"""Next-token cross-entropy, optionally in blocks of the vocabulary to bound the logits' memory, and router losses."""

import functools

import jax
import jax.numpy as jnp

from jaxtrain import nn
from jaxtrain.losses import weighted_mean
from jaxtrain.metrics import ratio
from jaxtrain.nn.linear import linear
from jaxtrain.systems.memory_lm.banks import deployed
from jaxtrain.systems.memory_lm.memory_read import PER_TOKEN
from jaxtrain.systems.memory_lm.router import (
    LOSSES,
    coefficients,
    compute_router_auxiliary_loss,
    router_losses,
)
from jaxtrain.task import Loss, Statistics

IGNORE = -100


def token_losses(hidden, weight, labels, chunk_tokens: int = 0):
    """Return the negative log-likelihood in nats of each label, 0 where it is IGNORE: float32 in the labels' shape.

    hidden: [..., width]; weight: [vocabulary, width]; labels: int [...]. chunk_tokens: limits the logits' memory, in
    both passes, to that of so many tokens; 0 is unlimited. Sources: torch cross_entropy(ignore_index=-100); blocks of
    the vocabulary as in Wijmans et al. 2024: tokens and weight rows stay on their devices, and each row of the
    weight's gradient is written once.
    """
    if not chunk_tokens or chunk_tokens >= labels.size:
        return _nll(hidden, weight, labels)
    return _by_blocks(_block_count(len(weight), -(-labels.size // chunk_tokens)), hidden, weight, labels)


def _nll(hidden, weight, labels):
    logits = linear(hidden, weight).astype(jnp.float32)
    picked = nn.pick(logits, labels)
    return jnp.where(labels == IGNORE, 0.0, jax.nn.logsumexp(logits, axis=-1) - picked)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_blocks(blocks: int, hidden, weight, labels):
    return _by_blocks_forward(blocks, hidden, weight, labels)[0]


def _by_blocks_forward(blocks, hidden, weight, labels):
    """Accumulate the log-sum-exp over the blocks of the vocabulary with a running maximum (online softmax)."""
    split = _split(weight, blocks)

    def step(carry, index):
        largest, total, picked = carry
        rows, columns = _block(split, index)
        logits = jnp.where(columns < weight.shape[0], linear(hidden, rows).astype(jnp.float32), -jnp.inf)
        grown = jnp.maximum(largest, logits.max(-1))
        total = total * jnp.exp(largest - grown) + jnp.exp(logits - grown[..., None]).sum(-1)
        picked += jnp.where(columns == labels[..., None], logits, 0.0).sum(-1)
        return (grown, total, picked), None

    zeros = jnp.zeros(labels.shape, jnp.float32)
    (largest, total, picked), _ = jax.lax.scan(step, (zeros - jnp.inf, zeros, zeros), jnp.arange(blocks))
    normaliser = largest + jnp.log(total)
    return jnp.where(labels == IGNORE, 0.0, normaliser - picked), (hidden, weight, labels, normaliser)


def _by_blocks_backward(blocks, residuals, cotangent):
    """Recompute each block's logits, and from their gradient the block's rows of the weight's gradient.

    The gradient of hidden is summed over the blocks in float32.
    """
    hidden, weight, labels, normaliser = residuals
    split = _split(weight, blocks)
    upstream = jnp.where(labels == IGNORE, 0.0, cotangent)[..., None]

    def step(carry, index):
        grad_hidden, grad_split = carry
        rows, columns = _block(split, index)
        logits, pullback = jax.vjp(linear, hidden, rows)
        p = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
        grad_logits = jnp.where(columns < weight.shape[0], (p - (columns == labels[..., None])) * upstream, 0.0)
        of_hidden, of_rows = pullback(grad_logits.astype(logits.dtype))
        grad_split = jax.lax.dynamic_update_index_in_dim(grad_split, of_rows, index, axis=1)
        return (grad_hidden + of_hidden.astype(jnp.float32), grad_split), None

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(split)
    (grad_hidden, grad_split), _ = jax.lax.scan(step, start, jnp.arange(blocks))
    return grad_hidden.astype(hidden.dtype), grad_split.reshape(-1, weight.shape[1])[: weight.shape[0]], None


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)


def _block_count(vocabulary: int, count: int) -> int:
    """Return the first number of blocks in wanted..2 * wanted that divides the vocabulary, else `wanted`.

    If it divides, the weight needs no padded copy.
    """
    count = min(count, vocabulary)
    return next((n for n in range(count, 2 * count + 1) if vocabulary % n == 0), count)


def _split(weight, blocks: int):
    """Reshape the weight to [rows of a block, blocks, width], padded if needed.

    A block is every blocks-th row, so rows stay on their devices if the vocabulary is sharded.
    """
    return jnp.pad(weight, ((0, -weight.shape[0] % blocks), (0, 0))).reshape(-1, blocks, weight.shape[1])


def _block(split, index):
    """Return a block's rows [rows, width] and their row numbers in the weight."""
    rows = jax.lax.dynamic_index_in_dim(split, index, axis=1, keepdims=False)
    return rows, jnp.arange(split.shape[0]) * split.shape[1] + index


def shifted_labels(batch):
    """Return the labels of the next tokens, int [batch, time].

    IGNORE marks the last position, invalid rows, padding, and the last token of a document in packed rows.
    """
    following = lambda x, last: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=last)
    labels = following(batch["labels"], IGNORE)
    labels = jnp.where(batch["valid"][:, None] & (token_mask(batch) != 0), labels, IGNORE)
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        labels = jnp.where(following(segments, 0) == segments, labels, IGNORE)
    return labels


def token_mask(batch):
    """Return a mask [batch, time] that is false for padding (segment 0 in packed rows)."""
    return batch["attention_mask"] if "attention_mask" in batch else batch["segment_ids"] > 0


def run_model(model, batch, rngs=None):
    """Return the model's Output on a batch. In evaluation, banks are quantised if `memory.quantize_memory` is set."""
    return (model if rngs is not None else deployed(model))(
        batch["input_ids"],
        token_mask(batch),
        position_ids=batch.get("position_ids"),
        segment_ids=batch.get("segment_ids"),
        lengths=batch.get("lengths"),
        rngs=rngs,
    )


def loss(model, batch, config, rngs) -> Loss:
    """Return the loss in nats per label, in training plus the router losses averaged over the memory layers.

    The weight is the number of labels; a batch without labels gives 0 with weight 0. Parts, in training: ce; router;
    router/<term> averaged over layers; router_entropy/<layer> in nats.
    """
    output = run_model(model, batch, rngs)
    labels = shifted_labels(batch)
    nll = token_losses(output.hidden, model.head_weight, labels, config.loss.chunk_tokens)
    value, weight = weighted_mean(nll, labels != IGNORE)
    if rngs is None or not output.routing:
        return Loss(value, weight, {"ce": value} if rngs is not None else {})
    rows = lambda routing: _rows(routing, batch, config.memory.routing_strategy_train)
    terms = [router_losses(routing, rows(routing)) for routing in output.routing.values()]
    router = aggregate_router_losses(terms, config.memory)
    router = jnp.where(weight > 0, router, 0.0)
    parts = {"ce": value, "router": router}
    parts |= {f"router/{name}": sum(term[name] for term in terms) / len(terms) for name in (*LOSSES, "entropy")}
    parts |= {f"router_entropy/{layer}": term["entropy"] for layer, term in zip(output.routing, terms, strict=True)}
    return Loss(value + router, weight, parts)


def aggregate_router_losses(terms, memory):
    """Return the mean over layers of the router losses times the coefficients of the `memory` section."""
    scale = coefficients(memory)
    return compute_router_auxiliary_loss(terms, scale["load_balance"], scale["auxiliary"], scale["z_loss"])


def _rows(routing, batch, strategy: str):
    """Return a mask of the rows of a Routing that count in the router losses: those of valid samples.

    Padding tokens count, as in the original. In packed rows with one choice per document, each document counts once
    and padding does not.
    """
    valid = batch["valid"]
    if "segment_ids" in batch and strategy not in PER_TOKEN:
        segments = batch["segment_ids"]
        last = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)), constant_values=True)
        return last & (segments > 0) & valid[:, None]
    return jnp.broadcast_to(valid.reshape(-1, *(1,) * (routing.logits.ndim - 2)), routing.logits.shape[:-1])


def outputs(model, batch):
    """Return the log-probability of each label [batch, time - 1], 0 where there is no label.

    Also chapters/<layer>: by memory layer, the router's mean probability of each chapter [batch, chapter].
    """
    labels = shifted_labels(batch)
    output = run_model(model, batch)
    result = {"log_probability": -token_losses(output.hidden, model.head_weight, labels, 1024)[:, :-1]}
    for layer, routing in output.routing.items():
        p = jax.nn.softmax(routing.logits, axis=-1)
        result[f"chapters/{layer}"] = p.reshape(p.shape[0], -1, p.shape[-1]).mean(1)
    return result


def eval_statistics(outputs, batch, config) -> Statistics:
    """Return the sums from which `compute` gets perplexity and chapter entropy."""
    sums = {"nll": -outputs["log_probability"].sum(), "labels": (shifted_labels(batch) != IGNORE).sum()}
    for name, p in outputs.items():
        if name.startswith("chapters/"):
            sums[name] = jnp.where(batch["valid"][:, None], p, 0.0).sum(0)
    return Statistics(sums=sums)


def histograms(model, batch, config) -> dict:
    """Return the chosen chapters by memory layer, as float with NaN for padding.

    Shape [batch, time, k], or [batch, k] if a row has one choice.
    """
    counted = (token_mask(batch) != 0) & batch["valid"][:, None]

    def chosen(routing):
        keep = counted if routing.indices.ndim == 3 else counted.any(1)
        return jnp.where(keep[..., None], routing.indices.astype(jnp.float32), jnp.nan)

    return {f"chapters/{layer}": chosen(routing) for layer, routing in run_model(model, batch).routing.items()}


def compute(sums, rows, config) -> dict[str, float]:
    """Return perplexity, and per memory layer the entropy in nats of the mean chapter probabilities.

    The entropy is ln C if C chapters are used evenly.
    """
    import numpy as np

    metrics = {"perplexity": float(np.exp(min(ratio(sums["nll"], sums["labels"]), 80.0)))}
    for name, total in sums.items():
        if name.startswith("chapters/"):
            p = np.asarray(total) / max(float(np.sum(total)), 1e-30)
            entropy = float(-(p * np.log(np.maximum(p, 1e-12))).sum())
            metrics[f"chapter_entropy/{name.removeprefix('chapters/')}"] = entropy
    return metrics
