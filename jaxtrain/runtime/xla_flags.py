"""XLA options that let a GPU compute while it communicates: the one place that sets them. XLA_FLAGS wins."""

import os
from collections.abc import Mapping

OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,  # start collectives early, wait for them late
    "xla_gpu_enable_pipelined_all_gather": True,  # a loop over blocks gathers the next block's weights ahead (fsdp)
    "xla_gpu_enable_pipelined_reduce_scatter": True,  # and sends its gradients while the one before computes
}


def options(devices: int, environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Compiler options of a program on so many GPUs; none for one, and none that XLA_FLAGS sets itself."""
    flags = environ.get("XLA_FLAGS", "")
    return {name: value for name, value in OPTIONS.items() if name not in flags} if devices > 1 else {}
