"""Activation checkpointing (rematerialisation): the backward pass recomputes activations instead of storing them.

A model calls its blocks through `block(module, x, rngs=rngs)`. The run decides what is recomputed (`train.remat: none |
dots | full`), not the model.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keeps weight products, recomputes the rest
    "full": jax.checkpoint_policies.nothing_saveable,  # keeps a block's inputs only
}


@dataclasses.dataclass
class Scope:
    """The policy in force. policy: one of POLICIES. blocks: number of blocks called under it. pieces: the model's
    sharded parameters, by key. gather: gathers some of them; a recomputed block gathers its weights again for the
    backward pass instead of keeping them."""

    policy: str
    blocks: int = 0
    pieces: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    gather: Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]] | None = None


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("remat", default=None)


@contextlib.contextmanager
def rematerialise(policy: str, pieces: Mapping[str, jax.Array], gather: Callable | None) -> Iterator[Scope]:
    """Make blocks called in this context follow `policy`, and gather their own weights if these are sharded."""
    scope = Scope(policy, 0, pieces, gather)
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def recomputing() -> bool:
    """Return True if the run recomputes blocks in the backward pass."""
    scope = _scope.get()
    return scope is not None and scope.policy != "none"


def recompute(function: Callable, *arguments: Any) -> Any:
    """Call function(*arguments) as one block that the backward pass recomputes by the current policy."""
    scope = _scope.get()
    scope.blocks += 1
    return jax.checkpoint(function, policy=POLICIES[scope.policy])(*arguments)


def block(module: nnx.Module, *arguments: Any, **options: Any) -> Any:
    """Call module(*arguments, **options); the backward pass recomputes it if the run says so.

    Dropout is replayed with the same masks, and running statistics are updated once. The numbers equal those of the
    plain call, except for differences in the compiler's fusion.
    """
    scope = _scope.get()
    if not recomputing():
        return module(*arguments, **options)
    graphdef, params, others = nnx.split(module, nnx.Param, ...)
    if scope.gather is not None:
        keys = [variable.get_metadata("key") for _, variable in nnx.to_flat_state(params)]
        params = jax.tree.unflatten(jax.tree.structure(params), [scope.pieces[key] for key in keys])

    def run(params, others):
        if scope.gather is not None:
            whole = scope.gather(dict(zip(keys, jax.tree.leaves(params), strict=True)))
            params = jax.tree.unflatten(jax.tree.structure(params), [whole[key] for key in keys])
        inner = nnx.merge(graphdef, params, others)
        result = inner(*arguments, **options)
        return result, nnx.split(inner, nnx.Param, ...)[2]

    result, others = recompute(run, params, others)
    nnx.update(module, others)
    return result
