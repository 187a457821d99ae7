"""Set XLA's compiler options for programs on GPUs; no other module does. XLA_FLAGS takes precedence."""

import functools
import os
import re
from collections.abc import Mapping

import jax

OVERLAP = {  # let a GPU compute while it communicates
    "xla_gpu_enable_latency_hiding_scheduler": True,  # start collectives early, wait for them late
    "xla_gpu_enable_pipelined_all_gather": True,  # a loop over blocks gathers the next block's weights ahead (fsdp)
    "xla_gpu_enable_pipelined_reduce_scatter": True,  # and sends its gradients while the block before it computes
}
DETERMINISTIC = {
    "xla_gpu_deterministic_ops": True,
    # Determinism switches off autotuning, so Triton may choose a slow tile for a product; cuBLAS chooses by itself.
    "xla_gpu_enable_triton_gemm": False,
}


def options(devices: int, deterministic: bool, environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Return the compiler options for a program on so many GPUs, without options that XLA_FLAGS sets or that the
    installed XLA lacks (0.11 dropped those of the pipelined collectives)."""
    flags = environ.get("XLA_FLAGS", "")
    wanted = (DETERMINISTIC if deterministic else {}) | (OVERLAP if devices > 1 else {})
    return {name: value for name, value in wanted.items() if name not in flags and is_offered(name)}


def is_deterministic(deterministic: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if XLA's operations are deterministic: as XLA_FLAGS says, else as `deterministic` says."""
    said = re.findall(
        r"--xla_gpu_(deterministic|exclude_nondeterministic)_ops(?:=(\w+))?", environ.get("XLA_FLAGS", "")
    )
    known = {name: value.lower() not in ("false", "0") for name, value in said}
    return known.get("deterministic", deterministic) or known.get("exclude_nondeterministic", False)


@functools.cache
def is_offered(name: str) -> bool:
    """Return True if the installed XLA has the compiler option."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: True})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
