"""Choosing chapters: pooling, top-k selection, and the losses that keep the choice balanced."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.losses import weighted_mean
from jaxtrain.nn import float8

LOSSES = ("load_balance", "auxiliary", "z_loss")


class Routing(NamedTuple):
    """Hold a router's choice. indices: int [..., k], chapters; weights: float [..., k], sum 1; both by descending
    weight; logits: float [..., chapter]. The leading axes are the batch, for token routing [batch, time]."""

    indices: jax.Array
    weights: jax.Array
    logits: jax.Array


class ChapterRouter(nnx.Module):
    """router: Linear(width, chapters). The first `shared` chapters are never chosen: every token reads them anyway.

    Raises UserError where top_k does not fit.
    """

    def __init__(self, width: int, num_chapters: int, top_k: int, shared: int = 0, window: int = 128, *, rngs):
        if not 0 < top_k <= num_chapters:
            raise UserError(f"memory.top_k_chapters: {top_k}, wanted 1 to num_chapters={num_chapters}")
        self.router = nn.Linear(width, num_chapters, rngs=rngs)
        self.num_chapters = num_chapters
        self.top_k = top_k
        self.shared = shared
        self.window = window

    def __call__(self, hidden, strategy: str = "sequence", mask=None) -> Routing:
        """hidden: [batch, time, width]. mask: [batch, time], left out to count padding as the original does."""
        if strategy == "sequence":
            return self.route(masked_mean(hidden, mask))
        if strategy == "sequence-rolling":
            return self.route(rolling_mean(hidden, self.window, mask))
        if strategy == "token":
            return self.route_tokens(hidden)
        raise UserError(f"routing strategy {strategy!r} is unknown here")

    def route(self, pooled) -> Routing:
        """pooled: [..., width]; one choice each."""
        with float8.products(False):  # a choice between chapters is not worth the rounding
            return self.choose(self.router(pooled).astype(jnp.float32))

    def route_tokens(self, hidden) -> Routing:
        """One choice per token; hidden: [batch, time, width]."""
        return self.route(hidden)

    def choose(self, logits) -> Routing:
        probabilities = jax.nn.softmax(logits, axis=-1)
        free = jnp.where(jnp.arange(self.num_chapters) < self.shared, 0.0, probabilities)
        free = free / jnp.maximum(free.sum(-1, keepdims=True), 1e-12)
        count = min(self.top_k, self.num_chapters - self.shared)
        weights, indices = jax.lax.top_k(free[..., self.shared :], count)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-12)
        return Routing(indices + self.shared, weights, logits)


def masked_mean(hidden, mask=None):
    """Mean over time; mask: [batch, time], at least one position is counted."""
    if mask is None:
        return hidden.mean(1)
    mask = mask.astype(hidden.dtype)[..., None]
    return (hidden * mask).sum(1) / jnp.maximum(mask.sum(1), 1.0)


def rolling_mean(hidden, window: int, mask=None):
    """Mean over time of the mean over the last `window` positions up to each."""
    ones = jnp.ones(hidden.shape[:2], jnp.float32) if mask is None else mask.astype(jnp.float32)
    share = _shares(ones, window, 0, hidden.shape[1] - 1)
    return jnp.einsum("bp,bpd->bd", share.astype(hidden.dtype), hidden)


def document_mean(hidden, window: int, starts, ends):
    """`rolling_mean` of each position's own document, [batch, time, width]; a window of 1 gives its plain mean.

    starts, ends: int [batch, time], the first and the last position of each one's document.
    """
    share = _shares(jnp.ones(hidden.shape[:2], jnp.float32), window, starts, ends)
    return _window_sums(share[..., None] * hidden.astype(jnp.float32), starts, ends).astype(hidden.dtype)


def _shares(ones, window: int, starts, ends):
    """How much each position counts in the mean over its document of means over windows: float32 [batch, time]."""
    place = jnp.arange(ones.shape[1])
    width = min(window, ones.shape[1])
    counts = _window_sums(ones, jnp.maximum(place - width + 1, starts), place)  # positions behind each mean
    share = _window_sums(ones / jnp.maximum(counts, 1.0), place, jnp.minimum(place + width - 1, ends)) * ones
    return share / jnp.maximum(_window_sums(ones, starts, ends), 1.0)


def _window_sums(values, first, last):
    """Sums of values [batch, time, ...] over first..last, both inclusive: int [batch, time], [time] or one number."""
    total = jnp.pad(jnp.cumsum(values, axis=1), ((0, 0), (1, 0), *((0, 0),) * (values.ndim - 2)))
    flat = total.reshape(*total.shape[:2], -1)
    shape = values.shape
    at = lambda places: nn.tokens(flat, jnp.broadcast_to(places, shape[:2])).reshape(shape)
    return at(last + 1) - at(first)


def prefix_mean(hidden, mask=None, total=None, count=None, starts=None):
    """Mean over all positions up to each: [batch, time, width], causal.

    total [batch, width], count [batch]: what a cache holds of earlier positions. starts: int [batch, time], the first
    position of each one's document, where rows hold several. Gives the means, the new total and count.
    """
    ones = jnp.ones(hidden.shape[:2], jnp.float32) if mask is None else mask.astype(jnp.float32)
    sums = jnp.cumsum(hidden.astype(jnp.float32) * ones[..., None], axis=1)
    counts = jnp.cumsum(ones, axis=1)
    if total is not None:
        sums, counts = sums + total[:, None], counts + count[:, None]
    last = (sums[:, -1], counts[:, -1])
    if starts is not None:
        before = lambda values: nn.tokens(jnp.pad(values, ((0, 0), (1, 0), (0, 0))), starts)
        sums, counts = sums - before(sums), counts - before(counts[..., None])[..., 0]
    return (sums / jnp.maximum(counts, 1.0)[..., None]).astype(hidden.dtype), *last


def router_losses(routing: Routing, rows=None) -> dict[str, jax.Array]:
    """Balance terms and the entropy of the choice, over the rows (batch, or batch and time) with `rows` true.

    load_balance = C sum_i f_i P_i, with f_i how often chapter i was chosen per row (no gradient) and P_i its mean
    probability: k where uniform, not 1. auxiliary = mean_i (mean p_i^2 - 1/C)^2. z_loss = mean logsumexp^2. entropy in
    nats. No row gives zeros. Source: Fedus et al. 2021 for the first; the original's formulas (docs/memory_lm.md).
    """
    chapters = routing.logits.shape[-1]
    logits = routing.logits.reshape(-1, chapters)
    chosen = routing.indices.reshape(logits.shape[0], -1)
    weight = jnp.ones(logits.shape[0]) if rows is None else rows.reshape(-1).astype(jnp.float32)
    mean = lambda values: _mean(values, weight)
    p = jax.nn.softmax(logits, axis=-1)
    frequency = jax.lax.stop_gradient(mean(jax.nn.one_hot(chosen, chapters).sum(1)))
    some = weight.sum() > 0
    return {
        "load_balance": chapters * (frequency * mean(p)).sum(),
        "auxiliary": jnp.where(some, jnp.square(mean(jnp.square(p)) - 1 / chapters).mean(), 0.0),
        "z_loss": mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
        "entropy": mean(-(p * jnp.log(jnp.maximum(p, 1e-12))).sum(-1)),
    }


def _mean(values, weight):
    if values.ndim == 1:
        return weighted_mean(values, weight)[0]
    total = jnp.where(weight.sum() > 0, weight.sum(), 1.0)
    return (values * weight[:, None]).sum(0) / total


def compute_total_router_loss(losses: dict, load_balance: float, auxiliary: float, z_loss: float):
    """One layer's terms, each times its coefficient; coefficients <= 0 and absent terms count nothing."""
    coefficients = dict(zip(LOSSES, (load_balance, auxiliary, z_loss), strict=True))
    return sum((c * losses[name] for name, c in coefficients.items() if c > 0 and name in losses), jnp.float32(0))


def coefficients(memory) -> dict[str, float]:
    """A `memory` section's coefficient by loss, 0 where its switch is off."""
    return {
        "load_balance": memory.load_balance_coefficient if memory.use_load_balance_loss else 0.0,
        "auxiliary": memory.auxiliary_loss_coefficient if memory.use_auxiliary_loss else 0.0,
        "z_loss": memory.z_loss_coefficient if memory.use_z_loss else 0.0,
    }


def compute_router_auxiliary_loss(
    router_losses, load_balance_coef: float = 0.01, auxiliary_coef: float = 0.0, z_loss_coef: float = 0.0
):
    """Mean over the layers with terms of `compute_total_router_loss`; 0 for none."""
    given = [losses for losses in router_losses if losses]
    totals = [compute_total_router_loss(losses, load_balance_coef, auxiliary_coef, z_loss_coef) for losses in given]
    return sum(totals) / len(totals) if totals else jnp.float32(0)
