"""Next-token cross-entropy, plain or in chunks whose logits are never all in memory, plus the router's terms."""

import jax
import jax.numpy as jnp

from jaxtrain.losses import weighted_mean
from jaxtrain.metrics import ratio
from jaxtrain.nn.linear import linear
from jaxtrain.systems.memory_lm.banks import deployed
from jaxtrain.systems.memory_lm.router import (
    LOSSES,
    coefficients,
    compute_router_auxiliary_loss,
    router_losses,
)
from jaxtrain.task import Loss, Statistics

IGNORE = -100


def token_losses(hidden, weight, labels, chunk_tokens: int = 0):
    """Negative log-likelihood in nats of each label, 0 where it is IGNORE: float32 with labels' shape.

    hidden: [..., width]; weight: [vocabulary, width]; labels: int [...]. chunk_tokens: how many tokens' logits exist at
    a time, in both passes; 0 for all. Source: torch cross_entropy(ignore_index=-100); chunks as Wijmans et al. 2024.
    """
    if not chunk_tokens or chunk_tokens >= labels.size:
        return _nll(hidden, weight, labels)
    width, size = hidden.shape[-1], labels.size
    chunks = -(-size // chunk_tokens)
    pad = chunks * chunk_tokens - size
    flat_hidden = jnp.pad(hidden.reshape(size, width), ((0, pad), (0, 0))).reshape(chunks, chunk_tokens, width)
    flat_labels = jnp.pad(labels.reshape(size), (0, pad), constant_values=IGNORE).reshape(chunks, chunk_tokens)
    return _chunked(flat_hidden, weight, flat_labels).reshape(-1)[:size].reshape(labels.shape)


def _nll(hidden, weight, labels):
    logits = linear(hidden, weight).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(labels == IGNORE, 0.0, jax.nn.logsumexp(logits, axis=-1) - picked)


@jax.custom_vjp
def _chunked(hidden, weight, labels):
    return jax.lax.map(lambda pair: _nll(pair[0], weight, pair[1]), (hidden, labels))


def _chunked_forward(hidden, weight, labels):
    return _chunked(hidden, weight, labels), (hidden, weight, labels)


def _chunked_backward(residuals, cotangent):
    """One chunk's logits again, and its share of both gradients; the weight's is summed in float32."""
    hidden, weight, labels = residuals

    def chunk(total, inputs):
        h, label, upstream = inputs
        _, pullback = jax.vjp(lambda h, w: _nll(h, w, label), h, weight)
        grad_hidden, grad_weight = pullback(upstream)
        return total + grad_weight.astype(jnp.float32), grad_hidden

    total, grad_hidden = jax.lax.scan(chunk, jnp.zeros(weight.shape, jnp.float32), (hidden, labels, cotangent))
    return grad_hidden, total.astype(weight.dtype), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def shifted_labels(batch):
    """Labels of the next token [batch, time - 1]; IGNORE in rows that are not valid, after padding and across
    documents."""
    labels = batch["labels"][:, 1:]
    labels = jnp.where(batch["valid"][:, None] & (token_mask(batch)[:, :-1] != 0), labels, IGNORE)
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        labels = jnp.where(segments[:, 1:] == segments[:, :-1], labels, IGNORE)
    return labels


def token_mask(batch):
    """[batch, time], false for padding, which has segment 0 in packed rows."""
    return batch["attention_mask"] if "attention_mask" in batch else batch["segment_ids"] > 0


def run_model(model, batch, rngs=None):
    """The model's Output on a batch; in evaluation with the quantised bank where `memory.quantize_memory` says so."""
    return (model if rngs is not None else deployed(model))(
        batch["input_ids"],
        token_mask(batch),
        position_ids=batch.get("position_ids"),
        segment_ids=batch.get("segment_ids"),
        rngs=rngs,
    )


def loss(model, batch, config, rngs) -> Loss:
    """Nats per label; in training plus the router's terms, averaged over the memory layers. weight: labels.

    Parts, in training: ce; router/<term> averaged over layers; router_entropy/<layer>, nats. A batch without labels
    gives 0 with weight 0.
    """
    output = run_model(model, batch, rngs)
    labels = shifted_labels(batch)
    nll = token_losses(output.hidden[:, :-1], model.head_weight, labels, config.loss.chunk_tokens)
    value, weight = weighted_mean(nll, labels != IGNORE)
    if rngs is None or not output.routing:
        return Loss(value, weight, {"ce": value} if rngs is not None else {})
    terms = [router_losses(routing, _rows(routing, batch)) for routing in output.routing.values()]
    router = aggregate_router_losses(terms, config.memory)
    router = jnp.where(weight > 0, router, 0.0)
    parts = {"ce": value, "router": router}
    parts |= {f"router/{name}": sum(term[name] for term in terms) / len(terms) for name in (*LOSSES, "entropy")}
    parts |= {f"router_entropy/{layer}": term["entropy"] for layer, term in zip(output.routing, terms, strict=True)}
    return Loss(value + router, weight, parts)


def aggregate_router_losses(terms, memory):
    """Mean over layers of each layer's terms times the section's coefficients."""
    scale = coefficients(memory)
    return compute_router_auxiliary_loss(terms, scale["load_balance"], scale["auxiliary"], scale["z_loss"])


def _rows(routing, batch):
    """Which rows of a Routing belong to valid samples. Padding tokens count, as in the original."""
    valid = batch["valid"]
    return jnp.broadcast_to(valid.reshape(-1, *(1,) * (routing.logits.ndim - 2)), routing.logits.shape[:-1])


def outputs(model, batch):
    """Log-probability of each label [batch, time - 1], 0 where there is none; and by memory layer the mean probability
    that the router gives each chapter [batch, chapter]."""
    labels = shifted_labels(batch)
    output = run_model(model, batch)
    result = {"log_probability": -token_losses(output.hidden[:, :-1], model.head_weight, labels, 1024)}
    for layer, routing in output.routing.items():
        p = jax.nn.softmax(routing.logits, axis=-1)
        result[f"chapters/{layer}"] = p.reshape(p.shape[0], -1, p.shape[-1]).mean(1)
    return result


def statistics(outputs, batch, config) -> Statistics:
    """Sums for perplexity and for how chapters are used."""
    sums = {"nll": -outputs["log_probability"].sum(), "labels": (shifted_labels(batch) != IGNORE).sum()}
    for name, p in outputs.items():
        if name.startswith("chapters/"):
            sums[name] = jnp.where(batch["valid"][:, None], p, 0.0).sum(0)
    return Statistics(sums=sums)


def histograms(model, batch, config) -> dict:
    """By memory layer the chapters that were chosen, as float, NaN for padding: [batch, time, k], or [batch, k] where
    a row has one choice."""
    counted = (token_mask(batch) != 0) & batch["valid"][:, None]

    def chosen(routing):
        keep = counted if routing.indices.ndim == 3 else counted.any(1)
        return jnp.where(keep[..., None], routing.indices.astype(jnp.float32), jnp.nan)

    return {f"chapters/{layer}": chosen(routing) for layer, routing in run_model(model, batch).routing.items()}


def finish(sums, rows, config) -> dict[str, float]:
    """perplexity; per memory layer the entropy in nats of the mean probability over chapters (ln C where even)."""
    import numpy as np

    metrics = {"perplexity": float(np.exp(min(ratio(sums["nll"], sums["labels"]), 80.0)))}
    for name, total in sums.items():
        if name.startswith("chapters/"):
            p = np.asarray(total) / max(float(np.sum(total)), 1e-30)
            entropy = float(-(p * np.log(np.maximum(p, 1e-12))).sum())
            metrics[f"chapter_entropy/{name.removeprefix('chapters/')}"] = entropy
    return metrics
