"""Run a model's blocks one after another; equal ones may run as one compiled scan.

A model has `layers`, `bank_of` (its memory layers), `scan_layers`, `block` (one layer and its memory), `plain_block` (a
layer without memory) and `kind_of` (layers of the same kind differ only in their weights).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.runtime.spread import split_tokens


def run_layers(model, hidden, view, strategy: str, prefill: bool, routing: dict, rngs=None):
    """Return the last block's output and the outputs of all blocks; write each memory layer's Routing to `routing`."""
    outputs = []
    hidden = split_tokens(hidden)
    for first, count in runs(model, view):
        if count > 1:
            hidden, between = _scan(model, first, count, hidden, view, rngs)
            outputs += list(between)
            continue
        hidden, chosen = model.block(first, hidden, view, strategy, prefill, rngs)
        hidden = split_tokens(hidden)
        outputs.append(hidden)
        if chosen is not None:
            routing[first] = chosen
    return hidden, tuple(outputs)


def runs(model, view) -> list[tuple[int, int]]:
    """Return (first layer, number of layers) of consecutive runs of layers.

    Layers of one kind without memory form one run if scan_layers is set and there is no cache, else each is its own.
    """
    count = len(model.layers)
    if not model.scan_layers or view.cache is not None:
        return [(layer, 1) for layer in range(count)]
    kind = lambda layer: (layer in model.bank_of, model.kind_of(layer))
    pieces: list[tuple[int, int]] = []
    for layer in range(count):
        if layer and layer not in model.bank_of and kind(layer) == kind(layer - 1):
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + 1)
        else:
            pieces.append((layer, 1))
    return pieces


def _scan(model, first: int, count: int, hidden, view, rngs):
    """Run `count` equal blocks as a scan over their stacked weights, recomputed in the backward pass.

    The numbers are those of separate blocks, except for dropout, whose random keys differ.
    """
    blocks = [model.layers[first + i] for i in range(count)]
    graphdef = nnx.split(blocks[0])[0]
    states = [nnx.split(block)[1] for block in blocks]
    leaves = [jnp.stack(each) for each in zip(*map(jax.tree.leaves, states), strict=True)]
    # Not jax.tree.map over the states: their structures differ, because every variable is marked with its own key.
    stacked = jax.tree.unflatten(jax.tree.structure(states[0]), leaves)
    keys = None if rngs is None else jax.random.split(rngs(), count)

    def body(hidden, inputs):
        key, state = inputs
        layer_rngs = None if key is None else type(rngs)(key)
        hidden = model.plain_block(nnx.merge(graphdef, state), hidden, view, first, layer_rngs)
        hidden = split_tokens(hidden)
        return hidden, hidden

    return jax.lax.scan(body if rngs is None else jax.checkpoint(body), hidden, (keys, stacked))
