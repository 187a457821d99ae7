"""Choose chapters: pooling, top-k selection, and the losses that keep the choice balanced."""

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
    """A router's choice. indices: int [..., k], chapters by descending weight; weights: float [..., k], sum 1; logits:
    float [..., chapter]. The leading axes are [batch], or [batch, time] for routing per token."""

    indices: jax.Array
    weights: jax.Array
    logits: jax.Array


class ChapterRouter(nnx.Module):
    """Router with a Linear(width, chapters). It never chooses the first `shared` chapters: every token reads them.

    Raises UserError if top_k is not in 1..num_chapters.
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
        """Return the Routing for hidden [batch, time, width].

        mask: [batch, time]; None counts padding tokens, as the original does. Raises UserError for another strategy.
        """
        if strategy == "sequence":
            return self.route(masked_mean(hidden, mask))
        if strategy == "sequence-rolling":
            return self.route(rolling_mean(hidden, self.window, mask))
        if strategy == "token":
            return self.route_tokens(hidden)
        raise UserError(f"routing strategy {strategy!r} is unknown here")

    def route(self, pooled) -> Routing:
        """Return one choice for each vector of pooled, [..., width]."""
        with float8.products(False):  # no float8: its rounding could change the choice
            return self.choose(self.router(pooled).astype(jnp.float32))

    def route_tokens(self, hidden) -> Routing:
        """Return one choice per token of hidden, [batch, time, width]."""
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
    """Return the mean over time; mask: [batch, time]; the divisor is at least 1."""
    if mask is None:
        return hidden.mean(1)
    mask = mask.astype(hidden.dtype)[..., None]
    return (hidden * mask).sum(1) / jnp.maximum(mask.sum(1), 1.0)


def rolling_mean(hidden, window: int, mask=None):
    """Return the mean over time of the running means over the last `window` positions."""
    ones = jnp.ones(hidden.shape[:2], jnp.float32) if mask is None else mask.astype(jnp.float32)
    share = _shares(ones, window, 0, hidden.shape[1] - 1)
    return jnp.einsum("bp,bpd->bd", share.astype(hidden.dtype), hidden)


def document_mean(hidden, window: int, starts, ends):
    """Return the `rolling_mean` of each position's document, [batch, time, width]; window 1 gives the plain mean.

    starts, ends: int [batch, time], the first and the last position of each position's document.
    """
    share = _shares(jnp.ones(hidden.shape[:2], jnp.float32), window, starts, ends)
    return _window_sums(share[..., None] * hidden.astype(jnp.float32), starts, ends).astype(hidden.dtype)


def _shares(ones, window: int, starts, ends):
    """Return each position's weight in the mean of its document's running means, float32 [batch, time]."""
    position = jnp.arange(ones.shape[1])
    width = min(window, ones.shape[1])
    counts = _window_sums(ones, jnp.maximum(position - width + 1, starts), position)  # positions in each running mean
    share = _window_sums(ones / jnp.maximum(counts, 1.0), position, jnp.minimum(position + width - 1, ends)) * ones
    return share / jnp.maximum(_window_sums(ones, starts, ends), 1.0)


def _window_sums(values, first, last):
    """Return the sums of values [batch, time, ...] over positions first..last, both inclusive.

    first, last: int [batch, time], [time] or a number.
    """
    total = jnp.pad(jnp.cumsum(values, axis=1), ((0, 0), (1, 0), *((0, 0),) * (values.ndim - 2)))
    flat = total.reshape(*total.shape[:2], -1)
    shape = values.shape
    at = lambda places: nn.tokens(flat, jnp.broadcast_to(places, shape[:2])).reshape(shape)
    return at(last + 1) - at(first)


def prefix_mean(hidden, mask=None, total=None, count=None, starts=None):
    """Return the causal mean over all positions up to each, [batch, time, width], and the new total and count.

    total [batch, width], count [batch]: sum and number of earlier positions, from a cache. starts: int [batch, time],
    the first position of each position's document in packed rows.
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
    """Return the balance losses and the entropy of the choice, over the rows (batch, or batch and time) of `rows`.

    load_balance = C sum_i f_i P_i, where f_i is how often chapter i is chosen per row (no gradient) and P_i its mean
    probability; if uniform it is k, not 1. auxiliary = mean_i (mean p_i^2 - 1/C)^2. z_loss = mean logsumexp^2. entropy
    in nats. Without rows all are 0. Sources: Fedus et al. 2021 for load_balance; the original (docs/memory_lm.md).
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
    """Return the sum of one layer's losses times their coefficients; skips coefficients <= 0 and missing losses."""
    coefficients = dict(zip(LOSSES, (load_balance, auxiliary, z_loss), strict=True))
    return sum((c * losses[name] for name, c in coefficients.items() if c > 0 and name in losses), jnp.float32(0))


def coefficients(memory) -> dict[str, float]:
    """Return the coefficients of the router losses in a `memory` section, 0 for disabled ones."""
    return {
        "load_balance": memory.load_balance_coefficient if memory.use_load_balance_loss else 0.0,
        "auxiliary": memory.auxiliary_loss_coefficient if memory.use_auxiliary_loss else 0.0,
        "z_loss": memory.z_loss_coefficient if memory.use_z_loss else 0.0,
    }


def compute_router_auxiliary_loss(
    router_losses, load_balance_coef: float = 0.01, auxiliary_coef: float = 0.0, z_loss_coef: float = 0.0
):
    """Return the mean of `compute_total_router_loss` over the layers that have losses; 0 if none has."""
    terms = [losses for losses in router_losses if losses]
    totals = [compute_total_router_loss(losses, load_balance_coef, auxiliary_coef, z_loss_coef) for losses in terms]
    return sum(totals) / len(totals) if totals else jnp.float32(0)
