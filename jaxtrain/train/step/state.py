"""Training state of a run, and the structure of the model without its arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import PrecisionConfig
from jaxtrain.runtime.mesh import Layout
from jaxtrain.runtime.precision import POLICIES
from torch_bridge.layouts import Frozen, attribute_order, key_of, restore_order

Arrays = dict[str, jax.Array]  # by the variable's path joined with dots, which is its torch key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that changes from step to step, and nothing else.

    step: int32, batches seen; it determines the data position and the random keys. updates: int32, optimizer updates
    made, without skipped steps. params: trained parameters. frozen: the other parameters. buffers: all other variables
    (running statistics, carried state). ema: averaged params, or empty. scale: dynamic loss scale, or empty. guard:
    running mean of the gradient norm if loss spikes are skipped, or empty.
    """

    step: jax.Array
    updates: jax.Array
    rng: jax.Array
    params: Arrays
    frozen: Arrays
    buffers: Arrays
    opt_state: Any
    ema: Arrays
    scale: Arrays
    guard: Arrays

    def replace(self, **changes) -> "TrainState":
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """Structure of a model, without arrays. `split` and `merge` convert model <-> arrays, cheaply and traceably."""

    graphdef: Any
    treedef: Any
    keys: tuple[str, ...]
    kinds: tuple[str, ...]  # "params", "frozen" or "buffers", by key
    order: tuple  # of attributes, as torch registers them
    stay_finite: frozenset[str]  # keys of the buffers that need no protection from a step whose loss is NaN

    @classmethod
    def of(cls, model: nnx.Module, trainable: Callable[[str], bool]) -> "ModelDef":
        """Return a model's structure. Also stores in every variable its key, so that submodules know the full names."""
        for path, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Variable):
                variable.set_metadata(key=key_of(path))
        graphdef, state = nnx.split(model)
        keys, kinds, stay_finite = [], [], set()
        for path, variable in nnx.to_flat_state(state):
            keys.append(key_of(path))
            if variable.get_metadata("stays_finite", False):
                stay_finite.add(keys[-1])
            if isinstance(variable, nnx.Param) and trainable(keys[-1]):
                kinds.append("params")
            else:
                kinds.append("frozen" if isinstance(variable, (nnx.Param, Frozen)) else "buffers")
        order = attribute_order(model)
        return cls(graphdef, jax.tree.structure(state), tuple(keys), tuple(kinds), order, frozenset(stay_finite))

    def split(self, model: nnx.Module) -> tuple[Arrays, Arrays, Arrays]:
        """Return the model's params, frozen parameters and buffers."""
        parts: dict[str, Arrays] = {"params": {}, "frozen": {}, "buffers": {}}
        for key, kind, leaf in zip(self.keys, self.kinds, jax.tree.leaves(nnx.state(model)), strict=True):
            parts[kind][key] = leaf
        return parts["params"], parts["frozen"], parts["buffers"]

    def merge(self, params: Arrays, frozen: Arrays, buffers: Arrays) -> nnx.Module:
        arrays = params | frozen | buffers
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, [arrays[key] for key in self.keys]))
        restore_order(model, self.order)
        return model


def initial_scale(precision: PrecisionConfig) -> Arrays:
    """Return float16's initial loss scale and its count of updates since the last change; {} if losses are unscaled."""
    if not POLICIES[precision.policy].scaled:
        return {}
    return {"value": jnp.float32(precision.loss_scale), "good_steps": jnp.int32(0)}


def initial_guard(guarded: bool) -> Arrays:
    """Return the initial state of the spike guard, the mean gradient norm and its number of updates; {} without it."""
    return {"mean_norm": jnp.float32(0), "count": jnp.int32(0)} if guarded else {}


def state_shardings(state: TrainState, layout: Layout) -> TrainState:
    """Return the sharding of every array of a state; `state` may be abstract."""
    shapes = {key: value.shape for key, value in state.params.items()}
    kept = lambda arrays: {key: layout.parameter(key, value.shape) for key, value in arrays.items()}
    everywhere = lambda tree: jax.tree.map(lambda _: layout.replicated, tree)
    shardings: dict[str, Any] = {
        "step": layout.replicated,
        "updates": layout.replicated,
        "rng": layout.replicated,
        "params": kept(state.params),
        "frozen": kept(state.frozen),
        "buffers": everywhere(state.buffers),
        "opt_state": layout.moments(state.opt_state, shapes),
        "ema": kept(state.ema),
        "scale": everywhere(state.scale),
        "guard": everywhere(state.guard),
    }
    return TrainState(**shardings)
