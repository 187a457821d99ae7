"""How far the JAX form of a torch module is from torch: outputs, gradients, running statistics."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.utils import _pytree as pytree

from jaxtrain.runtime.prng import Rngs
from torch_bridge.datasets import to_numpy
from torch_bridge.from_torch import ConvertedModule, as_arguments, from_torch

OUTPUTS, GRADIENTS = 1e-5, 1e-4  # what is promised, relative L2, float32


@dataclasses.dataclass(frozen=True)
class Architecture:
    """build: -> (module, example inputs). training: compare the training graph (with dropout off) instead of the
    evaluation graph, so that batch statistics and their updates count too."""

    name: str
    source: str
    build: Callable[[], tuple[torch.nn.Module, Any]]
    training: bool = False


@dataclasses.dataclass(frozen=True)
class Distance:
    """Relative L2: the worst output, all gradients as one vector, all floating buffers after the call as one vector."""

    outputs: float
    gradients: float
    buffers: float
    parameters: int
    operators: frozenset[str]


def relative(ours, theirs) -> float:
    ours, theirs = np.asarray(ours, np.complex128), np.asarray(theirs, np.complex128)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.linalg.norm(ours - theirs) / max(float(np.linalg.norm(theirs)), 1e-12))


def _vector(arrays: dict, names) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(arrays[name].ravel() for name in names)])


def _in_order(outputs: Any) -> Any:
    """torch lists a dict's entries as they were put in; JAX sorts them."""
    if isinstance(outputs, dict):
        return [_in_order(value) for value in outputs.values()]
    return [_in_order(value) for value in outputs] if isinstance(outputs, (list, tuple)) else outputs


def operators_of(model: ConvertedModule) -> frozenset[str]:
    """Every operator in the model's recorded graphs."""
    return frozenset(
        str(node.target)
        for graph in model._record.graphs()
        for inner in graph.module.modules()
        if isinstance(inner, torch.fx.GraphModule)
        for node in inner.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )


def compare(architecture: Architecture, seed: int = 0) -> Distance:
    """Every output, and the gradients of a random projection of all floating outputs, from the same weights."""
    torch.manual_seed(seed)
    module, inputs = architecture.build()
    module.train(architecture.training)
    model = from_torch(module, inputs, ["training" if architecture.training else "evaluation"])
    args, kwargs = as_arguments(inputs)
    arrays = pytree.tree_map_only(torch.Tensor, lambda leaf: jnp.asarray(to_numpy(leaf)), (args, kwargs))

    theirs = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in theirs]
    real = [leaf.is_floating_point() for leaf in theirs]
    total = sum((leaf * torch.from_numpy(w)).sum() for leaf, w, use in zip(theirs, weights, real, strict=True) if use)
    total.backward()

    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def project(params, rest):
        model = nnx.merge(graph, params, rest, copy=True)
        rngs = Rngs(jax.random.key(0)) if architecture.training else None
        outputs = pytree.tree_leaves(_in_order(model(*arrays[0], **arrays[1], rngs=rngs)))
        value = sum(jnp.sum(x * w) for x, w, use in zip(outputs, weights, real, strict=True) if use)
        return value, (outputs, nnx.split(model, nnx.Param, ...)[2])

    (_, (ours, rest)), grads = jax.jit(jax.value_and_grad(project, has_aux=True))(params, rest)
    nnx.update(model, rest)
    buffers = {
        name: to_numpy(b) for name, b in module.named_buffers() if name in model.variables() and b.is_floating_point()
    }
    moved = {name: np.asarray(model.variables()[name].get_value()) for name in buffers}
    nnx.update(model, grads)
    wanted = {name: to_numpy(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    have = {name: np.asarray(variable.get_value()) for name, variable in model.variables().items()}
    return Distance(
        outputs=max(relative(x, to_numpy(y)) for x, y in zip(ours, theirs, strict=True)),
        gradients=relative(_vector(have, wanted), _vector(wanted, wanted)),
        buffers=relative(_vector(moved, buffers), _vector(buffers, buffers)),
        parameters=sum(p.numel() for p in module.parameters()),
        operators=operators_of(model),
    )


def check(architecture: Architecture, seed: int = 0) -> None:
    """Fails with the figures where a promise is missed."""
    distance = compare(architecture, seed)
    figures = (distance.outputs, distance.gradients, distance.buffers)
    assert distance.outputs < OUTPUTS, figures
    assert distance.gradients < GRADIENTS, figures
    assert distance.buffers < OUTPUTS, figures
