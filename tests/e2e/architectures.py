"""Small random models of many kinds, and how far their JAX form is from torch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.datasets import to_numpy
from torch_bridge.from_torch import as_arguments, from_torch


@dataclasses.dataclass(frozen=True)
class Architecture:
    name: str
    source: str
    build: Callable[[], tuple[torch.nn.Module, Any]]


@dataclasses.dataclass(frozen=True)
class Distance:
    """Relative L2 distances: outputs, all gradients together, and the worst single gradient with a norm to speak of."""

    outputs: float
    gradients: float
    parameters: int
    operators: frozenset


def relative(ours, theirs) -> float:
    ours, theirs = np.asarray(ours, np.complex128), np.asarray(theirs, np.complex128)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-12))


def _floats(tree) -> list:
    leaves = tree if isinstance(tree, list) else jax.tree.leaves(tree)
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def compare(architecture: Architecture, seed: int = 0) -> Distance:
    """Evaluation mode, float32: every output, and the gradients of a random projection of all floating outputs."""
    from flax import nnx

    torch.manual_seed(seed)
    module, inputs = architecture.build()
    module.eval()
    args, kwargs = as_arguments(inputs)
    theirs = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    model = from_torch(module, inputs)
    arrays = jax.tree.map(jnp.asarray, pytree.tree_map(to_numpy, (args, kwargs)))
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in theirs]
    graph, state = nnx.split(model)

    def project(params, rest):
        outputs = [x for x in jax.tree.leaves(nnx.merge(graph, params, rest)(*arrays[0], **arrays[1]))]
        pairs = zip(outputs, weights, strict=True)
        return sum(jnp.sum(x * w) for x, w in pairs if jnp.issubdtype(x.dtype, jnp.floating)), outputs

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    (_, ours), grads = jax.jit(jax.value_and_grad(project, has_aux=True))(params, rest)
    loss = sum((leaf * torch.from_numpy(w)).sum() for leaf, w in zip(theirs, weights) if leaf.is_floating_point())
    loss.backward()
    outputs = max(relative(x, to_numpy(y)) for x, y in zip(ours, theirs, strict=True))
    wanted = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    nnx.update(model, grads)
    have = {name: np.asarray(v.get_value()) for name, v in model.variables().items()}
    ours_flat = np.concatenate([have[name].ravel() for name in wanted])
    theirs_flat = np.concatenate([to_numpy(grad).ravel() for grad in wanted.values()])
    record = model._record
    operators = frozenset(
        str(node.target)
        for graphs in record._graphs.values()
        for graph, _ in graphs
        for node in graph.module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    )
    return Distance(outputs, relative(ours_flat, theirs_flat), theirs_flat.size, operators)
