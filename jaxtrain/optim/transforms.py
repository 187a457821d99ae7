"""Directions of the optimizers, without learning rate, decay and clipping: gradients -> updates.

Arithmetic is in float32 for every parameter dtype; moments are stored in the parameters' dtype, as in torch. States use
optax's names (`count`, `mu`, `nu`, `trace`), which the optimizer-state bridge reads. Lion is optax's. The others follow
torch, because optax differs: its adam computes 1 - 0.999^t in float32, 5e-5 off at the first step; its muon divides the
momentum by 1 - beta^t; its adafactor factors the two largest axes instead of the last two; its trace differs in its
last bits, because XLA contracts its multiplication and addition.

accept: True if the step is taken; otherwise the state does not change. It is applied to the moments before the updates
are computed from them, so that XLA writes the moments in place; applied afterwards, XLA would copy the old ones first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Arrays = dict[str, jax.Array]


class Direction(NamedTuple):
    """An optax transformation whose `update` also takes `accept`: update(gradients, state, parameters, accept=True)."""

    init: Callable[[Arrays], Any]
    update: Callable[..., tuple[Any, Any]]


def adam(beta1: float, beta2: float, eps: float) -> Direction:
    """Return Adam: m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps). Source: Kingma & Ba 2015; torch.optim.Adam."""

    def init(params: Arrays) -> optax.ScaleByAdamState:
        zeros = lambda: {key: jnp.zeros_like(value) for key, value in params.items()}
        return optax.ScaleByAdamState(jnp.int32(0), zeros(), zeros())

    @jax.jit  # traced and lowered once for all arrays of a shape
    def one(grad, mu, nu, first, second, accept):
        mu = _average(mu, grad, beta1, accept)
        nu = _average(nu, jnp.square(_wide(grad)), beta2, accept)
        return (mu / first) / (jnp.sqrt(nu) / second + eps), mu, nu

    def update(grads: Arrays, state: Any, params=None, *, accept=True):
        count = state.count + 1
        first, second = _gathered(beta1, count), jnp.sqrt(_gathered(beta2, count))
        moved = {key: one(grad, state.mu[key], state.nu[key], first, second, accept) for key, grad in grads.items()}
        updates, mu, nu = ({key: parts[place] for key, parts in moved.items()} for place in range(3))
        count = jnp.where(accept, count, state.count)
        return updates, optax.ScaleByAdamState(count, _stored(mu, params), _stored(nu, params))

    return Direction(init, update)


def momentum(decay: float, nesterov: bool) -> Direction:
    """Return momentum: b <- decay b + g; the update is b, with nesterov g + decay b. Source: torch.optim.SGD with
    dampening 0."""
    if not decay:
        return Direction(lambda params: optax.EmptyState(), lambda g, state, params=None, *, accept=True: (g, state))

    def init(params: Arrays) -> optax.TraceState:
        return optax.TraceState({key: jnp.zeros_like(value) for key, value in params.items()})

    def update(grads: Arrays, state: Any, params=None, *, accept=True):
        old = {key: _wide(value) for key, value in state.trace.items()}
        trace = {key: jnp.where(accept, decay * old[key] + _wide(grad), old[key]) for key, grad in grads.items()}
        updates = {key: _wide(grads[key]) + decay * value for key, value in trace.items()} if nesterov else trace
        return updates, optax.TraceState(_stored(trace, params))

    return Direction(init, update)


def lion(beta1: float, beta2: float) -> Direction:
    """Return Lion: sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g. Source: Chen et al. 2023, algorithm 2;
    optax."""
    return in_float32(optax.scale_by_lion(beta1, beta2))


def in_float32(transformation: optax.GradientTransformation) -> Direction:
    """Wrap an optax transformation to compute in float32 and keep its state in the parameters' dtype.

    A step that is not accepted leaves the state unchanged.
    """

    def update(grads: Arrays, state, params: Arrays | None = None, *, accept=True):
        wide = lambda tree: jax.tree.map(lambda x: _wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
        updates, moved = transformation.update(wide(grads), wide(state), params)
        kept = lambda new, old: jnp.where(accept, new, old).astype(old.dtype)
        return updates, jax.tree.map(kept, moved, state)

    return Direction(transformation.init, update)


class MuonState(NamedTuple):
    """State of Muon. mu: momentum of every parameter. nu: Adam's second moment of parameters that are no matrices."""

    count: jax.Array
    mu: Arrays
    nu: Arrays


def muon(beta: float, beta1: float, beta2: float, eps: float) -> Direction:
    """Return Muon: matrices move by their orthogonalised momentum, other parameters by Adam, at one learning rate.

    A matrix's update is scaled by 0.2 sqrt(max(rows, columns)), which gives it Adam's root mean square. Sources: Jordan
    2024 (Muon); Liu et al. 2025, sec. 2.2 (the scale); torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), which
    iterates in bfloat16 where this iterates in float32.
    """
    rest = adam(beta1, beta2, eps)
    matrices = lambda arrays: {key: value for key, value in arrays.items() if value.ndim == 2}
    others = lambda arrays: {key: value for key, value in arrays.items() if value.ndim != 2}

    def init(params: Arrays) -> MuonState:
        mu = {key: jnp.zeros_like(value) for key, value in params.items()}
        return MuonState(jnp.int32(0), mu, {key: jnp.zeros_like(value) for key, value in others(params).items()})

    def update(grads: Arrays, state: MuonState, params: Arrays, *, accept=True):
        mu = {key: _average(state.mu[key], grad, beta, accept) for key, grad in matrices(grads).items()}
        updates = {key: _orthogonal(_average(value, grads[key], beta)) for key, value in mu.items()}
        adam_state = optax.ScaleByAdamState(state.count, others(state.mu), state.nu)
        moved, adam_state = rest.update(others(grads), adam_state, others(params), accept=accept)
        mu = _stored(mu, params) | adam_state.mu
        return updates | moved, MuonState(adam_state.count, {key: mu[key] for key in state.mu}, adam_state.nu)

    return Direction(init, update)


class AdafactorState(NamedTuple):
    """State of Adafactor. row, column: averages of the squared gradient of arrays with two or more axes. full: those of
    the others."""

    count: jax.Array
    row: Arrays
    column: Arrays
    full: Arrays


def adafactor(clip_threshold: float = 1.0, decay: float = 0.8, eps: float = 1e-30) -> Direction:
    """Return Adafactor: Adam's second moment factored into rows and columns, no momentum, updates clipped to a root
    mean square of clip_threshold.

    Source: Shazeer & Stern 2018, algorithms 4 and 5; equals transformers' Adafactor with scale_parameter=False and
    relative_step=False.
    """

    def init(params: Arrays) -> AdafactorState:
        zeros = lambda shape: jnp.zeros(shape, jnp.float32)
        factored = {key: value for key, value in params.items() if value.ndim >= 2}
        return AdafactorState(
            jnp.int32(0),
            {key: zeros(value.shape[:-1]) for key, value in factored.items()},
            {key: zeros((*value.shape[:-2], value.shape[-1])) for key, value in factored.items()},
            {key: zeros(value.shape) for key, value in params.items() if key not in factored},
        )

    def update(grads: Arrays, state: AdafactorState, params=None, *, accept=True):
        count = state.count + 1
        beta = 1 - count.astype(jnp.float32) ** -decay
        row, column, full, updates = {}, {}, {}, {}
        for key, grad in grads.items():
            grad = _wide(grad)
            square = jnp.square(grad) + eps
            if key in state.row:
                row[key] = _average(state.row[key], square.mean(-1), beta, accept)
                column[key] = _average(state.column[key], square.mean(-2), beta, accept)
                share = row[key] / row[key].mean(-1, keepdims=True)
                step = grad * jax.lax.rsqrt(share)[..., None] * jax.lax.rsqrt(column[key])[..., None, :]
            else:
                full[key] = _average(state.full[key], square, beta, accept)
                step = grad * jax.lax.rsqrt(full[key])
            size = jnp.sqrt(jnp.mean(jnp.square(step)))
            updates[key] = step / jnp.maximum(1.0, size / clip_threshold)
        return updates, AdafactorState(jnp.where(accept, count, state.count), row, column, full)

    return Direction(init, update)


def of_optax(transformation: optax.GradientTransformation) -> Direction:
    """Wrap an optax transformation so that its state does not change if the step is not accepted."""
    inner = optax.with_extra_args_support(transformation)

    def update(grads: Arrays, state: Any, params=None, *, accept=True):
        updates, moved = inner.update({key: _wide(grad) for key, grad in grads.items()}, state, params)
        kept = lambda new, old: jnp.where(accept, new, old).astype(jnp.asarray(old).dtype)
        return updates, jax.tree.map(kept, moved, state)

    return Direction(inner.init, update)


def apart(direction: Direction, parts: Mapping[str, Sequence[str]]) -> Direction:
    """Return a direction with a separate update count for every part of the parameters; torch counts each parameter's.

    parts: name -> keys. `update` also takes `idle`: a part whose keys are all idle does not count the update.
    """

    def init(params: Arrays) -> dict[str, Any]:
        return {name: direction.init({key: params[key] for key in keys}) for name, keys in parts.items()}

    def update(grads: Arrays, state: Any, params: Arrays | None = None, *, accept=True, idle=frozenset()):
        updates, moved = {}, dict(state)
        for name, keys in parts.items():
            if set(keys) <= set(idle):
                updates |= {key: jnp.zeros_like(grads[key]) for key in keys}
                continue
            own = None if params is None else {key: params[key] for key in keys}
            found, moved[name] = direction.update({key: grads[key] for key in keys}, state[name], own, accept=accept)
            updates |= found
        return updates, moved

    return Direction(init, update)


def _wide(value: jax.Array) -> jax.Array:
    return value.astype(jnp.float32)


def _average(mean: jax.Array, value: jax.Array, decay: jax.Array | float, accept: jax.Array | bool = True) -> jax.Array:
    """Return the updated moving average, or the old mean if the step is not accepted."""
    mean = _wide(mean)
    return jnp.where(accept, decay * mean + (1 - decay) * _wide(value), mean)


def _gathered(beta: float, count: jax.Array) -> jax.Array:
    """Return 1 - beta^count, accurate although 1 - 0.999 loses digits in float32."""
    return -jnp.expm1(count.astype(jnp.float32) * math.log(beta)) if beta else jnp.float32(1)


def _stored(values: Arrays, like: Arrays | None) -> Arrays:
    return values if like is None else {key: value.astype(like[key].dtype) for key, value in values.items()}


def _orthogonal(matrix: jax.Array, steps: int = 5) -> jax.Array:
    """Return approximately U V^T of the matrix U S V^T, by a quintic Newton-Schulz iteration, scaled to Adam's size."""
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan 2024: the steepest slope at zero
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / jnp.maximum(jnp.linalg.norm(x), 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return 0.2 * math.sqrt(max(rows, columns)) * (x.T if rows > columns else x)
