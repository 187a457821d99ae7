"""The state of a run, and the model without its arrays."""

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

    step: int32, batches seen; it fixes the data position and the random keys. updates: int32, optimizer updates made;
    a skipped step does not count. params: trained. frozen: parameters that are not. buffers: all other variables
    (running statistics, carried state). ema: averaged params, or empty. scale: dynamic loss scale, or empty.
    guard: running mean of the gradient norm, where loss spikes are skipped, or empty.
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
    """A model's structure: with its arrays it is the model again. `split` and `merge` are cheap and traceable."""

    graphdef: Any
    treedef: Any
    keys: tuple[str, ...]
    kinds: tuple[str, ...]  # "params", "frozen" or "buffers", by key
    order: tuple  # of attributes, as torch registers them
    stay_finite: frozenset[str]  # keys of the buffers that need no protection from a step whose loss is NaN

    @classmethod
    def of(cls, model: nnx.Module, trainable: Callable[[str], bool]) -> "ModelDef":
        """Marks every variable with its key, so that a part of the model knows its parameters' names."""
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
        """The model's params, frozen parameters and buffers."""
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
    """Loss scale of float16: its value and the updates since it last changed; nothing where losses are not scaled."""
    if not POLICIES[precision.policy].scaled:
        return {}
    return {"value": jnp.float32(precision.loss_scale), "good_steps": jnp.int32(0)}


def initial_guard(guarded: bool) -> Arrays:
    """Hold the state of the spike guard: the mean gradient norm and the number of updates behind it."""
    return {"mean_norm": jnp.float32(0), "count": jnp.int32(0)} if guarded else {}


def state_shardings(state: TrainState, layout: Layout) -> TrainState:
    """Where every array of a state is kept; `state` may be abstract."""
    shapes = {key: value.shape for key, value in state.params.items()}

    def moment(path, leaf):
        key = next((p.key for p in reversed(path) if getattr(p, "key", None) in shapes), None)
        return layout.moment(key, leaf.shape) if key and leaf.shape == shapes[key] else layout.replicated

    kept = lambda arrays: {key: layout.parameter(key, value.shape) for key, value in arrays.items()}
    everywhere = lambda tree: jax.tree.map(lambda _: layout.replicated, tree)
    shardings: dict[str, Any] = {
        "step": layout.replicated,
        "updates": layout.replicated,
        "rng": layout.replicated,
        "params": kept(state.params),
        "frozen": kept(state.frozen),
        "buffers": everywhere(state.buffers),
        "opt_state": jax.tree_util.tree_map_with_path(moment, state.opt_state),
        "ema": kept(state.ema),
        "scale": everywhere(state.scale),
        "guard": everywhere(state.guard),
    }
    return TrainState(**shardings)
