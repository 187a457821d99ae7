"""Describe GPUs that you don't have, to compile programs for them.

Needs the extra `plan` (jax's CUDA compiler plug-in, without CUDA's libraries) and ptxas from a CUDA toolkit.
"""

import contextlib
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxtrain.errors import UserError, install
from jaxtrain.runtime.gpu_cards import GPUS, THREADS, UNITS, Gpu
from jaxtrain.runtime.kernel_cost import Card

# Device kinds by which jax (from 0.11 on) knows the GPU that a Triton kernel is lowered for, by compute capability
LEAST = (7, 5)  # compute capability; CUDA 13's compiler has none before, so a V100 is planned with its program
_KINDS = {
    (7, 5): "Tesla T4", (8, 0): "NVIDIA A100", (8, 6): "NVIDIA A10", (8, 9): "NVIDIA L40",
    (9, 0): "NVIDIA H100", (10, 0): "NVIDIA B200", (12, 0): "NVIDIA GeForce RTX 5090",
}  # fmt: skip
FLAGS = (
    "--xla_gpu_enable_triton_gemm=false",  # its tile sizes are autotuned on a real device
    "--xla_gpu_autotune_level=0",
)


def prepare() -> None:
    """Set the options that the GPU compiler needs; call it before jax uses a device. Raises UserError without the
    plug-in."""
    if not list(_plugin_folders()):
        raise UserError(f"plan: jax's CUDA compiler is not installed; {install('plan')}")
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    flags = (*FLAGS, f"--xla_gpu_cuda_data_dir={cuda}")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    os.environ["JAX_PLATFORMS"] = "cpu"  # the plug-in checks for a driver unless it is told to leave the GPU alone
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for other GPUs cannot be loaded here


def _plugin_folders():
    plugins = importlib.util.find_spec("jax_plugins")
    for folder in (plugins and plugins.submodule_search_locations) or ():
        yield from pathlib.Path(folder).glob("xla_cuda*")


def devices(target: str, count: int, hosts: int | None = None) -> list:
    """Return descriptions of `count` GPUs of one kind on `hosts` machines (by default 8 per machine, 72 of GB200)."""
    hosts = machines(target, count, hosts)
    if count % hosts:
        raise UserError(f"--devices {count} cannot be spread over --hosts {hosts} evenly")
    shape = f"{hosts}x{count // hosts}x1"
    try:
        topology = topologies.get_topology_desc(
            target, platform="cuda", topology=shape, target_config=_describe(target)
        )
    except Exception as error:
        raise UserError(f"plan: cannot compile for {target}: {' '.join(str(error).split())[:300]}") from None
    return list(topology.devices)


def lowering_for(devices: Sequence[Any]) -> contextlib.AbstractContextManager:
    """Return a context to trace and lower programs for such devices in. It sets their kind, for versions of jax that
    need it."""
    kind = devices[0].device_kind
    if kind not in _KINDS.values() or not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def gpu(target: str) -> Gpu:
    """Return the figures of a kind of GPU. Raises UserError for an unknown one."""
    if target not in GPUS:
        raise UserError(f"--target {target}: unknown; known here: {', '.join(GPUS)}")
    return GPUS[target]


def machines(target: str, count: int, hosts: int | None = None) -> int:
    """Return the number of machines (of NVLink's domains) that so many GPUs are on, unless it is given."""
    return hosts or -(-count // gpu(target).together)


def memory_bytes(target: str) -> int:
    """Return the bytes of one GPU that a program can use; the driver and the runtime take about 3 %."""
    return int(gpu(target).memory * 0.97)


def card(target: str, hosts: int) -> Card:
    """Return the peaks of a target GPU, in a run on so many machines."""
    of = gpu(target)
    link = of.link if hosts == 1 else min(of.link, of.network)
    return Card(of.half, of.single, of.plain, of.bandwidth, link, of.cores)


def check_products(target: str, policy: str) -> None:
    """Raise UserError if a GPU lacks the matrix products of a precision policy."""
    of, kind = gpu(target), "fp8" if policy == "fp8" else "bf16" if policy.startswith("bf16") else ""
    if (kind == "fp8" and of.fp8 is None) or (kind == "bf16" and not of.bf16):
        other = "bf16" if of.bf16 else "fp16"
        raise UserError(f"--target {target}: has no {kind} products; precision.policy={other} has")


def _describe(target: str) -> str:
    """Return the GPU's public figures in the format that XLA's GPU compiler reads (GpuTargetConfigProto)."""
    of = gpu(target)
    major, minor = max(of.capability, LEAST)
    threads, units = THREADS.get(of.capability, 2048), UNITS.get(of.capability, 128)
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {of.shared} threads_per_core_limit: {threads} core_count: {of.cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {of.bandwidth:.0f} l2_cache_size: {of.l2} clock_rate_ghz: {of.clock} device_memory_size: {of.memory}
  shared_memory_per_block_optin: {of.shared - 1024} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{_KINDS[major, minor]}"
"""
