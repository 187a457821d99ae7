"""Floating-point operations of a compiled step, counted in its jaxpr: products of matrices and convolutions.

XLA's own count is not used: it takes the body of a loop once, however often it runs.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The work of one step. flops: model FLOPs over all devices, None where unknown. peak: FLOP/s of one device."""

    samples: int
    flops: float | None = None
    devices: int = 1
    peak: float | None = None


def count(jaxpr: core.Jaxpr) -> float:
    """Operations (a multiply and an add are two) of one call, over all devices; element-wise work is left out, and so
    is what no result depends on, which XLA leaves out too.

    A loop counts its length (a `while` once), a branch its dearest arm, a choice by platform its cheapest: what a kind
    of device needs beyond that is no work of the model.
    """
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _count(live)


def _count(jaxpr: core.Jaxpr) -> float:
    return float(sum(_equation(equation) for equation in jaxpr.eqns))


def model_flops(flops: float, remat: str) -> float:
    """Without what `train.remat: full` computes again: a fourth of forward (1), recomputed (1) and backward (2)."""
    return flops * (0.75 if remat == "full" else 1.0)


def _equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (left_contract, _), (left_batch, _) = params["dimension_numbers"]
        left, right = (variable.aval.shape for variable in equation.invars)
        depth = math.prod(left[a] for a in left_contract)
        shared = math.prod(left[a] for a in left_batch)
        return (
            2.0
            * depth
            * shared
            * (math.prod(left) / max(1, depth * shared))
            * math.prod(right)
            / max(1, depth * shared)
        )
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_channels = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / max(1, out_channels)
    if name.startswith("dot_product_attention"):  # cuDNN's kernel, [batch, token, head, width]: two products, or four
        query, key = (variable.aval.shape for variable in equation.invars[:2])
        return (8.0 if "bwd" in name else 4.0) * math.prod(query) * key[1]
    if name == "ffi_call" and "fmha" in params["target_name"]:  # cuDNN's too, as jaxtrain.nn.cudnn calls it
        query, key = (variable.aval.shape for variable in equation.invars[:2])
        return (8.0 if params["target_name"].endswith("Backward") else 4.0) * math.prod(query) * key[1]
    if name == "pallas_call" and params.get("cost_estimate") is not None:
        return float(params["cost_estimate"].flops)
    inner = [_count(jaxpr) for jaxpr in _jaxprs(params)]
    if name == "cond":
        return min(inner) if params.get("branches_platforms") else max(inner, default=0.0)
    if name == "shard_map":
        return sum(inner) * params["mesh"].size
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _jaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
    leaves = jax.tree.leaves(
        list(params.values()), is_leaf=lambda leaf: isinstance(leaf, (core.Jaxpr, core.ClosedJaxpr))
    )
    return [
        leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf
        for leaf in leaves
        if isinstance(leaf, (core.Jaxpr, core.ClosedJaxpr))
    ]
