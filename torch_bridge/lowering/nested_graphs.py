"""Lowerings of operators that hold graphs: branches and loops, gradients that a module's code defines, hooks.

Each takes a Runner: runner(graph)(*arguments) returns the tuple of the graph's results.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.lowering.operators.derivatives import underived
from torch_bridge.lowering.recording.gradients import GRADIENT, HOOK, OWN_GRADIENT
from torch_bridge.lowering.recording.module_hooks import ENTER, LEAVE
from torch_bridge.lowering.table import TABLE, Call


@dataclasses.dataclass(frozen=True)
class Runner:
    """Makes a graph callable: `runner(graph)(*arguments)`. node: the one that is computed."""

    run_graph: Callable[..., list]
    call: Call
    node: Any

    def __call__(self, graph: Any) -> Callable[..., tuple]:
        return lambda *arguments: tuple(self.run_graph(graph, arguments, self.call))


def is_array(value: Any) -> bool:
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(value))


def _cond(runner, predicate, when_true, when_false, operands=()):
    if isinstance(predicate, bool):
        return runner(when_true if predicate else when_false)(*operands)
    return jax.lax.cond(predicate.reshape(()), runner(when_true), runner(when_false), *operands)


def _while_loop(runner, condition, body, carried, additional=()):
    test, step = runner(condition), runner(body)
    return jax.lax.while_loop(
        lambda state: test(*state, *additional)[0].reshape(()), lambda state: step(*state, *additional), tuple(carried)
    )


def _scan(runner, combine, init, xs, additional=()):
    """Return the carries, then the stacked outputs, in torch's order."""
    step = runner(combine)

    def body(carry, x):
        results = step(*carry, *x, *additional)
        return results[: len(init)], results[len(init) :]

    carry, stacked = jax.lax.scan(body, tuple(init), tuple(xs))
    return (*carry, *stacked)


def _map(runner, body, xs, additional=()):
    step = runner(body)
    return jax.lax.map(lambda row: step(*row, *additional), tuple(xs))


def _without_gradient(runner, enabled, body, *arguments):
    results = runner(body)(*arguments)
    return results if enabled else jax.lax.stop_gradient(results)


def _own_gradient(runner, ys, xs, residuals, backward, saved=True):
    """Lower a torch.autograd.Function: the values of its forward, the gradients of its own backward.

    saved: `backward` gets the outputs too. Second derivatives differentiate `backward`, through its residuals and the
    outputs.
    """
    arrays = [index for index, value in enumerate(residuals) if is_array(value)]

    @jax.custom_vjp
    def function(ys, xs, kept):
        return ys

    def forward(ys, xs, kept):
        outputs = function(ys, xs, kept)
        return outputs, (outputs if saved else [], kept)

    def pull(held, cotangents):
        outputs, kept = held
        given = dict(enumerate(residuals)) | dict(zip(arrays, kept, strict=True))  # the others are sizes
        return None, list(runner(backward)(*cotangents, *outputs, *given.values())), None

    function.defvjp(forward, pull)
    return function(jax.lax.stop_gradient(list(ys)), list(xs), [residuals[index] for index in arrays])


def _hook(runner, x, residuals, backward, why=""):
    """Lower Tensor.register_hook: return x, whose gradient the hook changes. why: refuse to differentiate that
    again."""
    reason = f"a backward hook {why} has no form in JAX where its gradient is differentiated again: write it as an "
    reason += "autograd.Function"
    once = lambda slopes: [underived(slope, reason, slope) for slope in slopes] if why else slopes
    backwards = lambda graph: lambda *given: once(runner(graph)(*given))
    return _own_gradient(backwards, [x], [x], residuals, backward, saved=False)[0]


def _enter(runner, xs, sizes, dtypes, kept, places, backward):
    """Return a module's arguments, and tokens: zeros, whose gradients the module's backward hooks receive."""
    arrays = [index for index, value in enumerate(kept) if is_array(value)]
    tokens = [jnp.zeros(shape, _carrier(dtype)) for shape, dtype in zip(sizes, dtypes, strict=True)]

    @jax.custom_vjp
    def function(xs, kept):
        return [*xs, *tokens]

    def pull(held, slopes):
        into, told = slopes[: len(xs)], slopes[len(xs) :]
        sent = len(kept) + len(told) - len(places)
        told = [value.astype(jax_dtype(dtype)) for value, dtype in zip(told, dtypes, strict=True)]
        given = dict(enumerate(kept)) | dict(zip(arrays, held, strict=True))  # the others are sizes
        residuals = [*given.values(), *told[sent:]]
        changed = runner(backward)(*into, *told[:sent], *(residuals[place] for place in places))
        return [slope.astype(x.dtype) for slope, x in zip(changed, into, strict=True)], None

    function.defvjp(lambda xs, kept: (function(xs, kept), kept), pull)  # differentiating twice runs the hooks again
    return function(list(xs), [kept[index] for index in arrays])


def _leave(runner, ys, tokens, sent, residuals, backward):
    """Return a module's outputs: its backward pre-hooks change their gradients, which the tokens then get."""
    arrays = [index for index, value in enumerate(residuals) if is_array(value)]

    @jax.custom_vjp
    def function(ys, tokens, sent, kept):
        return list(ys)

    def pull(held, slopes):
        sent, kept = held
        given = dict(enumerate(residuals)) | dict(zip(arrays, kept, strict=True))
        changed = runner(backward)(*slopes, *given.values())
        told = [value.astype(token.dtype) for value, token in zip([*changed, *sent], tokens, strict=False)]
        return [slope.astype(y.dtype) for slope, y in zip(changed, slopes, strict=True)], told, None, None

    function.defvjp(lambda ys, tokens, sent, kept: (function(ys, tokens, sent, kept), (sent, kept)), pull)
    return function(list(ys), list(tokens), list(sent), [residuals[index] for index in arrays])


def _carrier(dtype: Any) -> Any:
    """Return a dtype of gradients that can hold every number of another dtype."""
    return jnp.promote_types(jax_dtype(dtype), jnp.float32)


def _gradient(runner, xs, slopes, kept, rows, residuals, forward):
    """Lower torch.autograd.grad. kept: create_graph; else nothing is differentiated twice. rows: is_grads_batched."""
    if not kept:
        arrays = lambda values: [jax.lax.stop_gradient(value) if is_array(value) else value for value in values]
        xs, slopes, residuals = map(arrays, (xs, slopes, residuals))
    outputs, pull = jax.vjp(lambda *xs: runner(forward)(*xs, *residuals), *xs)
    slopes = tuple(slope.astype(y.dtype) for slope, y in zip(slopes, outputs, strict=True))
    return list((jax.vmap(pull) if rows else pull)(slopes))


def _autocast(runner, device, dtype, enabled, cache, body, *arguments):
    """Run the body. Autocast's casts are operators in it; the precision follows the training policy here."""
    return runner(body)(*arguments)


def _draw_and_store(runner, operator, *arguments, **options):
    """Return a random state, and what the operator draws from it: torch.utils.checkpoint draws the same again."""
    key = runner.call.key()
    drawn = TABLE[str(operator)](Call(lambda: key), *arguments, **options)
    bits = jax.lax.bitcast_convert_type(jax.random.key_data(key), jnp.uint8).reshape(-1)
    return bits, drawn


def _draw_again(runner, state, operator, *arguments, **options):
    data = jax.random.key_data(jax.random.key(0))
    bits = state[: data.size * data.dtype.itemsize].reshape(*data.shape, -1)
    key = jax.random.wrap_key_data(jax.lax.bitcast_convert_type(bits, data.dtype))
    return TABLE[str(operator)](Call(lambda: key), *arguments, **options)


HIGHER_ORDER = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "wrap_with_set_grad_enabled": _without_gradient,
    "wrap_with_autocast": _autocast,
    OWN_GRADIENT: _own_gradient,
    GRADIENT: _gradient,
    HOOK: _hook,
    ENTER: _enter,
    LEAVE: _leave,
    "run_and_save_rng_state": _draw_and_store,
    "run_with_rng_state": _draw_again,
}
