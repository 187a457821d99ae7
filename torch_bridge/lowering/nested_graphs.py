"""Lowerings of operators that hold graphs: branches and loops.

Each takes a Runner: runner(graph)(*arguments) returns the tuple of the graph's results.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    "run_and_save_rng_state": _draw_and_store,
    "run_with_rng_state": _draw_again,
}
