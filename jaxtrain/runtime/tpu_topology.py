"""Describe TPUs that you don't have, to compile programs for them.

Needs libtpu beside jax (the extra `plan-tpu`), which compiles without a TPU. No TPU has run what it compiles here.
"""

import dataclasses
import importlib.util
import math
import os
from typing import Any

import jax
from jax.experimental import topologies

from jaxtrain.errors import UserError, install

REACHED = 0.8  # fraction of the peaks that the estimate without XLA's own counts on
WORDS = "compiled, never run on one"


@dataclasses.dataclass(frozen=True)
class Tpu:
    """One kind of TPU, by chip. half: bf16 FLOP/s. memory: bytes of HBM. bandwidth: B/s. link: B/s in one direction to
    one neighbour. axes: of the torus that joins the chips of a slice; largest: chips of the largest slice."""

    half: float
    memory: int
    bandwidth: float
    link: float
    axes: int
    largest: int


# Source: cloud.google.com/tpu/docs, pages v5e, v5p and v6e, "system architecture"
TPUS = {
    "v5e": Tpu(197e12, 16 << 30, 819e9, 50e9, 2, 256),
    "v5p": Tpu(459e12, 95 << 30, 2765e9, 100e9, 3, 8960),
    "v6e": Tpu(918e12, 32 << 30, 1640e9, 112.5e9, 2, 256),
}


def prepare() -> None:
    """Set the options that libtpu needs on a machine without a TPU; call it before jax uses a device. Raises UserError
    without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"plan: libtpu, the TPU's compiler, is not installed; {install('plan-tpu')}")
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # it would ask Google's metadata server for a TPU
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }.items():
        os.environ.setdefault(name, value)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for a TPU cannot be loaded here


def devices(target: str, count: int) -> list:
    """Return descriptions of `count` chips of a slice. Raises UserError for a number that no slice has."""
    tpu = TPUS[target]
    if count & (count - 1) or count > tpu.largest:
        raise UserError(f"--devices {count}: slices of {target} have 1, 2, 4, ... {tpu.largest} chips")
    shape = "x".join(map(str, _shape(max(count, 4), tpu.axes)))
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{target}:{shape}")
    except Exception as error:
        raise UserError(f"plan: cannot compile for {target}:{shape}: {' '.join(str(error).split())[:300]}") from None
    return list(topology.devices)[:count]


def _shape(count: int, axes: int) -> list[int]:
    """Return the sides of a slice of `count` chips, a power of two, as equal as possible."""
    sides = [1] * axes
    for _ in range(int(math.log2(count))):
        sides[sides.index(min(sides))] *= 2
    return sorted(sides) if axes == 2 else sorted(sides, reverse=count < 8)


def memory_bytes(target: str) -> int:
    """Return the bytes of one chip that a program can use; the runtime takes about 3 %."""
    return int(TPUS[target].memory * 0.97)


def step_seconds(compiled: Any, tpu: Tpu) -> float:
    """Return XLA's own estimate of a call's seconds for the TPU; without one, the longer of its products and its bytes
    at a fraction of the peaks."""
    cost = compiled.cost_analysis() or {}
    own = cost.get("optimal_seconds", 0.0)
    if own > 0:
        return own
    return max(cost.get("flops", 0.0) / tpu.half, cost.get("bytes accessed", 0.0) / tpu.bandwidth) / REACHED


def foreign_calls(text: str) -> list[str]:
    """List the custom calls of a program that only a GPU has; none, for a program that a TPU can run."""
    names = ("__cudnn", "__cublas", "triton", "cu_", "__gpu")
    lines = [line for line in text.splitlines() if "custom_call_target=" in line]
    targets = {line.split('custom_call_target="', 1)[1].split('"', 1)[0] for line in lines}
    return sorted(target for target in targets if target.startswith(names))
