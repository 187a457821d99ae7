"""Training step: merge -> loss -> grads -> optimizer -> apply -> after_update. Pure, jitted once, state donated."""

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.data import row_keys
from jaxtrain.data.row_keys import gather
from jaxtrain.errors import UserError
from jaxtrain.nn import float8, scopes
from jaxtrain.nn.remat import rematerialise
from jaxtrain.optim.given import Given
from jaxtrain.optim.optimizer import Optimizer
from jaxtrain.runtime import traced_hparams
from jaxtrain.runtime.mesh import Layout
from jaxtrain.runtime.precision import Precision
from jaxtrain.runtime.prng import Rngs
from jaxtrain.task import Batch, Loss, MeanLoss, Task
from jaxtrain.train.step import local_data_parallel, step_guard
from jaxtrain.train.step.state import Arrays, ModelDef, TrainState

Parts = tuple[Batch, ...]  # of one batch: leaves [micro_batch, sample, ...], of different sizes (ShortBatches)
Step = Callable[[TrainState, Batch | Parts, dict, Arrays], tuple[TrainState, dict]]
Gradients = Callable[[TrainState, Parts, Arrays], tuple[Arrays, Loss, Arrays, jax.Array]]


def make_train_step(
    task: Task, config: Any, model_def: ModelDef, optimizer: Optimizer | Given, precision: Precision, layout: Layout,
    resting: Set[str] = frozenset(),
) -> Step:  # fmt: skip
    """Return the step (state, batch, hyper, columns) -> (state, metrics). All options are decided before compiling.

    batch: leaves [micro_batch, sample, ...], or Parts. hyper: `factor` float32 [updates] of the schedule, `lr` and
    `weight_decay` by group, `clip_norm` if there is clipping, `lr_scale` of the plateau rule, `numbers` by setting
    (Task.traced_hparams); or the `hyper` of the user's own optimizer. columns: the dataset, if it is on the device.
    resting: keys of parameters that this step does not update.
    """
    gradients = make_gradients(task, config, model_def, precision, layout, resting)
    guard = step_guard.Guard.of(config, precision)

    def train_step(state: TrainState, batch: Batch | Parts, hyper: dict, columns: Arrays) -> tuple[TrainState, dict]:
        settings = traced_hparams.put(config, hyper["numbers"])
        grads, loss, buffers, tokens = gradients(state, gather_parts(batch, columns), hyper["numbers"])

        rates = optimizer.rates(hyper, state.updates, state.step)
        norm = optimizer.norm(grads)
        verdict = guard.check(state, loss, norm)
        accept = (loss.weight > 0) & ~verdict.skipped  # a batch of weight 0 updates only the buffers
        idle = frozenset(state.params.keys() - grads.keys())
        grads |= {key: jnp.zeros_like(state.params[key]) for key in idle}
        with scopes.scope(scopes.OPTIMIZER):
            params, opt_state, _ = optimizer.update(
                grads, state.opt_state, state.params, *rates, norm=norm, accept=accept, loss=loss.value, idle=idle
            )
        params |= {key: state.params[key] for key in idle}  # no decay, no momentum: torch skips these too
        opt_state = _unchanged(opt_state, state.opt_state, idle)

        kept = state.buffers | {key: buffers[key] for key in model_def.stay_finite}
        buffers = _where(accept | verdict.finite, buffers, kept)
        counters = {"step": state.step + 1, "updates": state.updates + accept}
        done = state.replace(params=params, opt_state=opt_state, buffers=buffers, **counters)
        done = done.replace(scale=verdict.scale, guard=verdict.guard)
        if task.after_update is not None:
            model = model_def.merge(params, state.frozen, buffers)
            stale = task.after_update(model, done.updates, settings) or {}
            params, frozen, buffers = model_def.split(model)
            changed = done.replace(params=params, frozen=frozen, buffers=buffers, opt_state=_forget(opt_state, stale))
            done = _where(accept, changed, done)
        if state.ema:
            decay = config.optim.ema_decay
            latest = {key: done.params[key].astype(mean.dtype) for key, mean in state.ema.items()}
            ema = {key: decay * mean + (1 - decay) * latest[key] for key, mean in state.ema.items()}
            done = done.replace(ema=_where(accept, ema, state.ema))
        metrics = {"loss": loss.value, **loss.parts, "grad_norm": norm, "weight": loss.weight}
        metrics |= {"skipped": verdict.skipped, "tokens": tokens}
        metrics |= {"loss_scale": state.scale["value"]} if state.scale else {}
        metrics |= task.extra_metrics(settings, state.updates) if task.extra_metrics is not None else {}
        return done, metrics | rates_of(rates[0])

    return train_step


def gather_parts(batch: Batch | Parts, columns: Arrays) -> Parts:
    """Return the parts of a batch, with their rows gathered from the columns. Traced."""
    return tuple(gather(part, columns) for part in (batch if isinstance(batch, tuple) else (batch,)))


def make_gradients(
    task: Task, config: Any, model_def: ModelDef, precision: Precision, layout: Layout, resting: Set[str] = frozenset()
) -> Gradients:
    """Return (state, gathered parts, numbers) -> gradients, Loss, buffers after the forward pass, number of tokens.

    Gradients are by parameter, without parameters that the loss does not depend on: their grad is None in torch. The
    function raises UserError if there are none.
    """

    def loss_fn(settings, params: Arrays, frozen: Arrays, buffers: Arrays, batch: Batch, rng: jax.Array, scale):
        params = {key: _noting(reached, key, value) for key, value in params.items()}
        pieces = precision.for_compute(params | frozen)  # gathered in the compute dtype; recomputed blocks gather again
        model = model_def.merge(layout.gather(pieces), {}, buffers)
        gather_again = layout.gather if layout.gathers else None
        eights = float8.products(precision.float8)
        with layout.spread(), eights, rematerialise(config.train.remat, pieces, gather_again) as scope:
            found = task.loss(model, batch, settings, Rngs(rng))
        if scope.policy != "none" and not scope.blocks:
            raise UserError(
                f"train.remat: {scope.policy}, but this model marks no blocks to recompute; let it call them through "
                "jaxtrain.nn.block(module, x, rngs=rngs) (a torch module: keep them in a ModuleList), or take "
                "train.remat=none"
            )
        kind = MeanLoss if isinstance(found, MeanLoss) else Loss
        loss = kind(found.value.astype(jnp.float32), jnp.asarray(found.weight, jnp.float32), dict(found.parts))
        return loss.value * scale, (loss, model_def.split(model)[2])

    mean_of_means = config.train.accumulate_mean == "micro"
    reached: set[str] = set()

    def compute(state: TrainState, parts: Parts, rng: jax.Array, scale: jax.Array, numbers: Arrays):
        loss_of = functools.partial(loss_fn, traced_hparams.put(config, numbers))
        with traced_hparams.in_force(numbers):
            grads, loss, buffers = _accumulate(loss_of, mean_of_means)(state, parts, rng, scale)
            return grads, loss, buffers, functools.reduce(jnp.add, map(count_tokens, parts))

    per_device = local_data_parallel.per_device(compute, layout, mean_of_means) if layout.per_device else compute

    def gradients(state: TrainState, parts: Parts, numbers: Arrays):
        if resting:
            moving = {key: value for key, value in state.params.items() if key not in resting}
            fixed = {key: state.params[key] for key in resting}
            state = state.replace(params=moving, frozen=state.frozen | fixed)
        rng = jax.random.fold_in(state.rng, state.step)  # a resumed run replays the same dropout
        scale = state.scale["value"] if precision.scaled else jnp.float32(1)
        divides = all(row_keys.valid(part).shape[1] % layout.batch_devices == 0 for part in parts)
        run = per_device if divides else compute  # rows that do not divide are on every device
        grads, loss, buffers, tokens = run(state, parts, rng, scale, numbers)
        grads = {key: grad for key, grad in layout.scatter(grads).items() if key in reached}
        if not grads and not resting:
            raise UserError(
                "the loss depends on no parameter that trains (detach(), no_grad(), stop_gradient, or all of them are "
                "frozen), so there is nothing to train"
            )
        return grads, loss, buffers, tokens

    return gradients


def _noting(reached: set[str], key: str, value: jax.Array) -> jax.Array:
    """Return the value itself; when a gradient reaches it while the step is traced, add its key to `reached`."""

    @jax.custom_vjp
    def same(value):
        return value

    def back(_, grad):
        reached.add(key)
        return (grad,)

    same.defvjp(lambda value: (value, None), back)
    return same(value)


def repeat(step: Callable, times: int, precision: Precision | None = None, as_loop: bool = False) -> Step:
    """Return a step that runs `times` steps in one dispatch; batches and metrics get a leading axis if times > 1.

    as_loop: also run a single step as a loop of length 1. A compiler may order sums inside a loop differently, so this
    makes the parameters bit-identical for any `times`. precision: given if all frozen parameters are one model's; those
    that no step changes are then cast once per call.
    """
    if times > 1:

        def train_step(state, batches, hyper, columns):
            one = lambda state, batch: step(state, batch, hyper, columns)
            cast = state.frozen if precision is None else precision.for_compute(state.frozen)
            same = all(cast[key].dtype == value.dtype for key, value in state.frozen.items())
            if same or not _keeps_frozen(one, state, batches):
                return jax.lax.scan(one, state, batches)

            def body(state, batch):
                done, metrics = one(state.replace(frozen=cast), batch)
                return done.replace(frozen={}), metrics

            done, metrics = jax.lax.scan(body, state.replace(frozen={}), batches)
            return done.replace(frozen=state.frozen), metrics

        return train_step
    return single_step_as_loop(step) if as_loop else step


def _keeps_frozen(step: Callable, state: TrainState, batches: Batch) -> bool:
    """Return True if a step returns the frozen parameters unchanged. Traces it."""
    kept = []

    def probe(state, batch):
        done, _ = step(state, batch)
        kept.append(all(done.frozen[key] is value for key, value in state.frozen.items()))

    jax.eval_shape(probe, state, jax.tree.map(lambda leaf: leaf[0], batches))
    return kept[0]


def single_step_as_loop(step: Step) -> Step:
    step = jax.jit(step)  # traced once, for both the shapes and the loop

    def train_step(state, batch, hyper, columns):
        _, shapes = jax.eval_shape(step, state, batch, hyper, columns)
        stop = jax.lax.optimization_barrier(jnp.int32(1))  # the compiler would unroll a loop of known length 1

        def loop(index, carry):
            part = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf[None], index, keepdims=False), batch)
            state, metrics = step(carry[0], part, hyper, columns)
            put = lambda whole, value: jax.lax.dynamic_update_index_in_dim(whole, value, index, 0)
            return state, jax.tree.map(put, carry[1], metrics)

        empty = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), shapes)
        state, metrics = jax.lax.fori_loop(0, stop, loop, (state, empty))
        return state, jax.tree.map(lambda leaf: leaf[0], metrics)

    return train_step


class StackedMetrics:
    """Step whose metrics are one float32 vector: one transfer to the host instead of one per value.

    names: of the vector's elements; set once the step is traced.
    """

    def __init__(self, step: Step):
        self.step = step
        self.names: tuple[str, ...] = ()

    def __call__(self, state: TrainState, batch: Any, hyper: dict, columns: Arrays):
        state, metrics = self.step(state, batch, hyper, columns)
        self.names = tuple(metrics)
        return state, jnp.stack([jnp.asarray(value, jnp.float32) for value in metrics.values()])


def rates_of(lr: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return a step's learning rates as metrics: "lr", and "lr/<group>" if there are several; {} if unknown."""
    if not lr:
        return {}
    names = sorted(lr)
    first = "default" if "default" in lr else names[0]
    return {"lr": lr[first]} | ({f"lr/{name}": lr[name] for name in names} if len(names) > 1 else {})


def count_tokens(batch: Batch) -> jax.Array:
    """Count the tokens of a batch by its attention_mask over the valid rows; 0 if it has none."""
    mask = batch.get("attention_mask")
    if mask is None:
        return jnp.float32(0)
    valid = row_keys.valid(batch)
    return jnp.sum((mask > 0) & valid.reshape(valid.shape + (1,) * (mask.ndim - valid.ndim))).astype(jnp.float32)


def _accumulate(loss_fn, mean_of_means: bool):
    """Return a function for gradients, Loss and buffers of a batch cut into micro-batches. They equal the whole batch's
    because micro-batches count by their weight; for a MeanLoss, or with mean_of_means, each counts as 1."""
    grad_fn = jax.grad(loss_fn, has_aux=True)

    def whole(state: TrainState, batch: Batch, rng, scale):
        batch = jax.tree.map(lambda leaf: leaf[0], batch)
        grads, (loss, buffers) = grad_fn(state.params, state.frozen, state.buffers, batch, rng, scale)
        return jax.tree.map(lambda grad: grad / scale.astype(grad.dtype), grads), loss, buffers

    def in_turn(state: TrainState, parts: Parts, rng, scale):
        def micro(carry, inputs):
            buffers, total_grads, total = carry
            index, part = inputs
            key = jax.random.fold_in(rng, index)
            grads, (loss, buffers) = grad_fn(state.params, state.frozen, buffers, part, key, scale)
            share = local_data_parallel.share_of(loss, mean_of_means)
            add = lambda sums, values: jax.tree.map(lambda s, v: s + share * v.astype(jnp.float32), sums, values)
            values = {"loss": loss.value, **loss.parts}
            sums = (add(total[0], values), total[1] + share, total[2] + loss.weight)
            return (buffers, add(total_grads, grads), sums), None

        first = jax.tree.map(lambda leaf: leaf[0], parts[0])
        _, (loss, _) = jax.eval_shape(grad_fn, state.params, state.frozen, state.buffers, first, rng, scale)
        zeros = {name: jnp.float32(0) for name in ("loss", *loss.parts)}
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        carry, begin = (state.buffers, grads, (zeros, jnp.float32(0), jnp.float32(0))), 0
        for part in parts:
            end = begin + row_keys.valid(part).shape[0]
            carry, _ = jax.lax.scan(micro, carry, (jnp.arange(begin, end), part))
            begin = end
        buffers, grads, (values, share, weight) = carry
        share = jnp.maximum(share, jnp.finfo(jnp.float32).tiny)
        grads = jax.tree.map(lambda grad, p: (grad / (share * scale)).astype(p.dtype), grads, state.params)
        values = {name: value / share for name, value in values.items()}
        return grads, loss._replace(value=values.pop("loss"), weight=weight, parts=values), buffers

    def accumulated(state: TrainState, parts: Parts, rng, scale):
        alone = len(parts) == 1 and row_keys.valid(parts[0]).shape[0] == 1
        return whole(state, parts[0], rng, scale) if alone else in_turn(state, parts, rng, scale)

    return accumulated


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), new, old)


def _unchanged(opt_state: Any, before: Any, keys: Set[str]) -> Any:
    """Return the optimizer's state with the entries of these parameters as they were before."""

    def pick(path, new, old):
        return old if any(getattr(part, "key", None) in keys for part in path) else new

    return jax.tree_util.tree_map_with_path(pick, opt_state, before) if keys else opt_state


def _forget(opt_state: Any, stale: Mapping[str, jax.Array]) -> Any:
    """Return the optimizer's state with the moments of the marked elements zeroed; counters stay."""

    def clear(path, leaf):
        mask = next((stale[p.key] for p in reversed(path) if getattr(p, "key", None) in stale), None)
        return leaf if mask is None or mask.shape != leaf.shape else jnp.where(mask, 0, leaf).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(clear, opt_state) if stale else opt_state
