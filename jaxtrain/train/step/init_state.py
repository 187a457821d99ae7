"""Initial state of a run: the model's structure, its optimizer, and the compiled functions that create the arrays."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.optim import groups
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.runtime import traced_hparams
from jaxtrain.runtime.mesh import Layout, refuse_whole
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.runtime.waits import Waits
from jaxtrain.task import Task, group_of, trains
from jaxtrain.train.step.state import Arrays, ModelDef, TrainState, initial_guard, initial_scale, state_shardings
from torch_bridge import layouts
from torch_bridge.layouts import Frozen, key_of

Weights = tuple[Arrays, Arrays, Arrays]  # params, frozen and buffers


def group_labels(task: Task, config: Any, model: nnx.Module) -> dict[str, str]:
    """Return the group of every parameter, with its depth if there is layer decay.

    Raises UserError for a group of the config without a parameter.
    """
    found = members(task, config, model)
    groups.check(config.optim, found)
    return groups.labels(config.optim, found, list(found))


def members(task: Task, config: Any, model: nnx.Module) -> dict[str, str]:
    """Return the group of every parameter, in torch's parameter order."""
    first = layouts.first_names(model)
    order = {name: number for number, name in enumerate(layouts.parameter_order(model))}
    own = [key_of(path) for path, leaf in nnx.to_flat_state(nnx.state(model)) if isinstance(leaf, (nnx.Param, Frozen))]
    return {key: group_of(task, key, config) for key in sorted(own, key=lambda key: order.get(first.get(key, key), 0))}


def for_average(params: Arrays) -> Arrays:
    """Convert parameters to the dtype of their average: at least float32, or a slow average's steps round to zero."""
    wide = lambda value: jnp.promote_types(value.dtype, jnp.float32)
    return {
        key: value.astype(wide(value)) if jnp.issubdtype(value.dtype, jnp.inexact) else value
        for key, value in params.items()
    }


class Start:
    """Factory of initial states with the same structure, sharded from the start.

    model: the user's, or None for the task's. given: the user's own optimizer, or None for the config's. model_def,
    optimizer: shared by all states. shapes, shardings: of a state.
    """

    def __init__(self, task: Task, config: Any, layout: Layout, model: nnx.Module | None = None, given: Any = None):
        numbered = traced_hparams.marked(config, task.traced_hparams)
        build = lambda key=None: task.build_model(numbered, initial_rngs(config.seed if key is None else key))
        structure = _structure(config, build) if model is None else model
        model_def = self.model_def = ModelDef.of(structure, lambda key: trains(task, key, config))
        precision = POLICIES[config.precision.policy]

        def draw(seed) -> Weights:
            return model_def.split(build(jax.random.key(seed)))

        def begin(weights: Weights, seed) -> TrainState:
            params, frozen, buffers = weights
            params = precision.for_storage(params)
            return TrainState(
                step=jnp.int32(0),
                updates=jnp.int32(0),
                rng=jax.random.key(seed),
                params=params,
                frozen=frozen,
                buffers=buffers,
                opt_state=optimizer.init(params),
                ema=for_average(params) if config.optim.ema_decay is not None else {},
                scale=initial_scale(config.precision),
                guard=initial_guard(config.train.spike_factor is not None),
            )

        own = None if model is None else model_def.split(model)
        weights = jax.eval_shape(draw, np.int32(0)) if own is None else jax.eval_shape(lambda: own)
        stored = jax.eval_shape(precision.for_storage, weights[0])
        if given is not None:
            optimizer = self.optimizer = given.build(stored)
        else:
            optimizer = self.optimizer = optimizers.build(
                config.optim, stored, group_labels(task, config, structure), layout.whole_on_gpus
            )
        self.shapes = jax.eval_shape(begin, weights, np.int32(0))
        refuse_whole(layout, {key: value.shape for key, value in (weights[0] | weights[1]).items()})
        self.shardings = placed = state_shardings(self.shapes, layout)
        # two programs: drawing weights compiles slowly, and does not depend on optimizer or precision
        self._draw = jax.jit(draw, out_shardings=(placed.params, placed.frozen, placed.buffers))
        drawn = (0,) if model is None else ()  # the user's model must keep its arrays
        self._begin = jax.jit(begin, donate_argnums=drawn, out_shardings=placed)

    def abstract(self) -> TrainState:
        """Return the shapes and shardings of a state, without arrays."""
        return jax.tree.map(placed_shape, self.shapes, self.shardings)

    def state(self, seed: int, model: nnx.Module | None = None) -> TrainState:
        """Return a new state, from the user's model if given, else with weights drawn from the seed."""
        number = np.int64(seed).astype(np.int32)
        with Waits("the model", lambda frame: "").during("gets its first weights"):  # by programs that are compiled
            return self._begin(self._draw(number) if model is None else self.model_def.split(model), number)


MOST_NUMBERS = 2**48  # of one array: a petabyte of float32


def _structure(config: Any, build: Callable[[], nnx.Module]) -> nnx.Module:
    """Return the task's model without arrays. Raises UserError for settings that it cannot be built with."""
    try:
        model = layouts.abstract(build)
        for path, value in jax.tree.leaves_with_path(nnx.state(model)):
            if math.prod(value.shape) > MOST_NUMBERS:
                raise UserError(
                    f"{config.task}: {jax.tree_util.keystr(path)} would hold {math.prod(value.shape):.2g} numbers, of "
                    f"shape {value.shape}, more than any machine: look for a wrong size in `model`"
                )
        return model
    except UserError:
        raise
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"{config.task}: no model can be built with these settings: {error}") from error


def placed_shape(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the abstract array (shape, dtype) with this sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
