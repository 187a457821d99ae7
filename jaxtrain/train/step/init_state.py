"""The state that a run starts from: the model's structure, its optimizer, and the programs that make the arrays."""

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
from jaxtrain.task import Task, group_of, trains
from jaxtrain.train.step.state import Arrays, ModelDef, TrainState, initial_guard, initial_scale, state_shardings
from torch_bridge import layouts
from torch_bridge.layouts import Frozen, key_of

Weights = tuple[Arrays, Arrays, Arrays]  # params, frozen and buffers


def group_labels(task: Task, config: Any, model: nnx.Module) -> dict[str, str]:
    """The group of every parameter that trains, with its depth where there is layer decay.

    Raises UserError for a group of the config without a parameter.
    """
    found = members(task, config, model)
    groups.check(config.optim, found)
    return groups.labels(config.optim, found, list(found))


def members(task: Task, config: Any, model: nnx.Module) -> dict[str, str]:
    """The group of every parameter, in torch's order."""
    first = layouts.first_names(model)
    order = {name: number for number, name in enumerate(layouts.parameter_order(model))}
    own = [key_of(path) for path, leaf in nnx.to_flat_state(nnx.state(model)) if isinstance(leaf, (nnx.Param, Frozen))]
    return {key: group_of(task, key, config) for key in sorted(own, key=lambda key: order.get(first.get(key, key), 0))}


def for_average(params: Arrays) -> Arrays:
    """Parameters at the precision of their average: float32 at least, or the steps of a slow one are rounded away."""
    wide = lambda value: jnp.promote_types(value.dtype, jnp.float32)
    return {
        key: value.astype(wide(value)) if jnp.issubdtype(value.dtype, jnp.inexact) else value
        for key, value in params.items()
    }


class Start:
    """Makes states of one code, sharded from their first byte on.

    model: the user's, or None for the task's. given: an optimizer of the user's own, or None for the config's.
    model_def, optimizer: shared by all states. shapes, shardings: a state's.
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
        # two programs: the first compiles long, and knows neither optimizer nor precision
        self._draw = jax.jit(draw, out_shardings=(placed.params, placed.frozen, placed.buffers))
        drawn = (0,) if model is None else ()  # a model that was given keeps its arrays
        self._begin = jax.jit(begin, donate_argnums=drawn, out_shardings=placed)

    def abstract(self) -> TrainState:
        """Shapes and shardings of a state, without its arrays."""
        return jax.tree.map(placed_shape, self.shapes, self.shardings)

    def state(self, seed: int, model: nnx.Module | None = None) -> TrainState:
        """A new state: of the user's model where it is given, else of weights drawn from the seed."""
        number = np.int64(seed).astype(np.int32)
        return self._begin(self._draw(number) if model is None else self.model_def.split(model), number)


def _structure(config: Any, build: Callable[[], nnx.Module]) -> nnx.Module:
    """The task's model without its arrays. Raises UserError for settings that it cannot be built with."""
    try:
        return layouts.abstract(build)
    except UserError:
        raise
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"{config.task}: no model can be built with these settings: {error}") from error


def placed_shape(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, with the devices where it would lie."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
