"""XLA's options for programs that run on GPUs: the one place that sets them. XLA_FLAGS wins."""

import functools
import os
import re
from collections.abc import Mapping

import jax

OVERLAP = {  # let a GPU compute while it communicates
    "xla_gpu_enable_latency_hiding_scheduler": True,  # start collectives early, wait for them late
    "xla_gpu_enable_pipelined_all_gather": True,  # a loop over blocks gathers the next block's weights ahead (fsdp)
    "xla_gpu_enable_pipelined_reduce_scatter": True,  # and sends its gradients while the one before computes
}
DETERMINISTIC = {
    "xla_gpu_deterministic_ops": True,
    # Without measuring, which determinism switches off, a product may be given a slow tile; cuBLAS picks by itself.
    "xla_gpu_enable_triton_gemm": False,
}


def options(devices: int, deterministic: bool, environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Choose the compiler options of a program on so many GPUs; none that XLA_FLAGS sets itself, nor one that the
    installed XLA does not have (0.11 has lost the pipelined collectives')."""
    flags = environ.get("XLA_FLAGS", "")
    wanted = (DETERMINISTIC if deterministic else {}) | (OVERLAP if devices > 1 else {})
    return {name: value for name, value in wanted.items() if name not in flags and is_offered(name)}


def is_deterministic(deterministic: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether XLA's operations are deterministic: as asked for here, where XLA_FLAGS is silent."""
    said = re.findall(
        r"--xla_gpu_(deterministic|exclude_nondeterministic)_ops(?:=(\w+))?", environ.get("XLA_FLAGS", "")
    )
    known = {name: value.lower() not in ("false", "0") for name, value in said}
    return known.get("deterministic", deterministic) or known.get("exclude_nondeterministic", False)


@functools.cache
def is_offered(name: str) -> bool:
    """Tell whether the installed XLA has the option."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: True})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
