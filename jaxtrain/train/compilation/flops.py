"""Count the FLOPs of a compiled step in its jaxpr: matrix products and convolutions.

XLA's own count is not used, because it counts the body of a loop once, however often it runs.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Cost of one step. flops: model FLOPs over all devices, None if unknown. peak: FLOP/s of one device."""

    samples: int
    flops: float | None = None
    devices: int = 1
    peak: float | None = None


def count(jaxpr: core.Jaxpr) -> float:
    """Count the operations (multiply and add are two) of one call, over all devices. Element-wise operations, and code
    that no result depends on, which XLA removes too, are left out.

    A loop counts by its length (a `while` once), a `cond` by its most expensive branch. A choice by platform counts by
    its cheapest branch: what some device needs beyond that is not the model's work.
    """
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _count(live)


def _count(jaxpr: core.Jaxpr) -> float:
    return float(sum(_equation(equation) for equation in jaxpr.eqns))


def model_flops(flops: float, remat: str) -> float:
    """Return the FLOPs without recomputation: `train.remat: full` adds a fourth (forward 1, recomputed 1, backward
    2)."""
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
    if name.startswith("dot_product_attention"):  # cuDNN's kernel, [batch, token, head, width]: 2 products; backward: 4
        query, key = (variable.aval.shape for variable in equation.invars[:2])
        return (8.0 if "bwd" in name else 4.0) * math.prod(query) * key[1]
    if name == "ffi_call" and "fmha" in params["target_name"]:  # cuDNN's kernel as called by jaxtrain.nn.cudnn
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
