"""The training step: merge -> loss -> grads -> optimizer -> apply -> after_update. Pure, jitted once, state donated."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.data.loader import gather
from jaxtrain.optim.optimizer import Optimizer
from jaxtrain.runtime.precision import Precision
from jaxtrain.runtime.random import Rngs
from jaxtrain.task import Batch, Loss, Task
from jaxtrain.train.state import Arrays, Skeleton, TrainState

Step = Callable[[TrainState, Batch, dict, Arrays], tuple[TrainState, dict]]

SCALE_GROWTH_STEPS = 2000  # torch GradScaler's growth_interval; it doubles then, and halves on an overflow


def make_train_step(task: Task, config: Any, skeleton: Skeleton, optimizer: Optimizer, precision: Precision) -> Step:
    """(state, batch, hyper, columns) -> (state, metrics). Every option is decided here, before compiling.

    batch: leaves [micro_batch, sample, ...]. hyper: `factor` float32 [updates] of the schedule, `lr` and
    `weight_decay` by group, `lr_scale` of the plateau rule. columns: the dataset, where it lives on the device.
    """

    def loss_fn(params: Arrays, frozen: Arrays, buffers: Arrays, batch: Batch, rng: jax.Array, scale):
        model = skeleton.merge(precision.for_compute(params), precision.for_compute(frozen), buffers)
        value, weight, parts = task.loss(model, batch, config, Rngs(rng))
        loss = Loss(value.astype(jnp.float32), jnp.asarray(weight, jnp.float32), dict(parts))
        return loss.value * scale, (loss, skeleton.split(model)[2])

    compute_grads = _accumulate(loss_fn, config.train.accumulate_steps, config.train.accumulate_mean == "micro")

    def train_step(state: TrainState, batch: Batch, hyper: dict, columns: Arrays) -> tuple[TrainState, dict]:
        rng = jax.random.fold_in(state.rng, state.step)  # a resumed run replays the same dropout
        batch = gather(batch, columns)
        scale = state.scale["value"] if precision.scaled else jnp.float32(1)
        grads, loss, buffers = compute_grads(state, batch, rng, scale)

        factor = hyper["factor"][jnp.minimum(state.updates, hyper["factor"].size - 1)] * hyper["lr_scale"]
        lr = {group: peak * factor for group, peak in hyper["lr"].items()}
        params, opt_state, norm = optimizer.update(grads, state.opt_state, state.params, lr, hyper["weight_decay"])

        done = state.replace(params=params, opt_state=opt_state, buffers=buffers, updates=state.updates + 1)
        if task.after_update is not None:
            model = skeleton.merge(done.params, done.frozen, done.buffers)
            stale = task.after_update(model, done.updates, config) or {}
            new_params, new_frozen, new_buffers = skeleton.split(model)
            done = done.replace(params=new_params, frozen=new_frozen, buffers=new_buffers)
            done = done.replace(opt_state=_forget(done.opt_state, stale))
        if state.ema:
            decay = config.optim.ema_decay
            ema = {key: decay * mean + (1 - decay) * done.params[key] for key, mean in state.ema.items()}
            done = done.replace(ema=ema)

        counted = loss.weight > 0  # a batch of weight 0 moves no parameter, but what the loss carries on is kept
        done = jax.tree.map(lambda new, old: jnp.where(counted, new, old), done, state.replace(buffers=buffers))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss.value)
        if precision.scaled or config.train.nan_policy != "ignore":
            done = jax.tree.map(lambda new, old: jnp.where(finite, new, old), done, state)
        done = done.replace(step=state.step + 1, scale=_next_scale(state.scale, finite))
        metrics = {"loss": loss.value, **loss.parts, "grad_norm": norm, "weight": loss.weight, "skipped": ~finite}
        return done, metrics

    return train_step


def repeat(step: Step, times: int) -> Step:
    """`times` steps in one call: batches and metrics get a leading axis. One dispatch instead of many."""
    if times == 1:
        return step

    def many_steps(state, batches, hyper, columns):
        return jax.lax.scan(lambda state, batch: step(state, batch, hyper, columns), state, batches)

    return many_steps


def _accumulate(loss_fn, micro_batches: int, mean_of_means: bool):
    """Gradients, Loss and buffers of a batch cut into micro-batches: those of the whole batch at once, exactly, because
    every micro-batch counts by its weight (by 1 where the originals' mean of means is asked for)."""
    grad_fn = jax.grad(loss_fn, has_aux=True)

    def whole(state: TrainState, batch: Batch, rng, scale):
        batch = jax.tree.map(lambda leaf: leaf[0], batch)
        grads, (loss, buffers) = grad_fn(state.params, state.frozen, state.buffers, batch, rng, scale)
        return jax.tree.map(lambda grad: grad / scale.astype(grad.dtype), grads), loss, buffers

    def in_parts(state: TrainState, batch: Batch, rng, scale):
        def micro(carry, inputs):
            buffers, total_grads, total = carry
            index, part = inputs
            key = jax.random.fold_in(rng, index)
            grads, (loss, buffers) = grad_fn(state.params, state.frozen, buffers, part, key, scale)
            share = jnp.float32(1) if mean_of_means else loss.weight
            add = lambda sums, values: jax.tree.map(lambda s, v: s + share * v.astype(jnp.float32), sums, values)
            values = {"loss": loss.value, **loss.parts}
            sums = (add(total[0], values), total[1] + share, total[2] + loss.weight)
            return (buffers, add(total_grads, grads), sums), None

        part = jax.tree.map(lambda leaf: leaf[0], batch)
        _, (loss, _) = jax.eval_shape(grad_fn, state.params, state.frozen, state.buffers, part, rng, scale)
        zeros = {name: jnp.float32(0) for name in ("loss", *loss.parts)}
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        start = (state.buffers, grads, (zeros, jnp.float32(0), jnp.float32(0)))
        parts = (jnp.arange(micro_batches), batch)
        (buffers, grads, (values, share, weight)), _ = jax.lax.scan(micro, start, parts)
        share = jnp.maximum(share, jnp.finfo(jnp.float32).tiny)
        grads = jax.tree.map(lambda grad, p: (grad / (share * scale)).astype(p.dtype), grads, state.params)
        values = {name: value / share for name, value in values.items()}
        return grads, Loss(values.pop("loss"), weight, values), buffers

    return whole if micro_batches == 1 else in_parts


def _forget(opt_state: Any, stale: Mapping[str, jax.Array]) -> Any:
    """The optimizer's state with the moments of the marked elements zeroed; counters stay."""

    def clear(path, leaf):
        mask = next((stale[p.key] for p in reversed(path) if getattr(p, "key", None) in stale), None)
        return leaf if mask is None or mask.shape != leaf.shape else jnp.where(mask, 0, leaf).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(clear, opt_state) if stale else opt_state


def _next_scale(scale: Arrays, finite) -> Arrays:
    if not scale:
        return scale
    grown = scale["good_steps"] + 1 >= SCALE_GROWTH_STEPS
    value = jnp.where(finite, jnp.where(grown, scale["value"] * 2, scale["value"]), scale["value"] / 2)
    good_steps = jnp.where(finite & ~grown, scale["good_steps"] + 1, 0)
    return {"value": value, "good_steps": good_steps}
