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

from jaxtrain.errors import UserError
from jaxtrain.runtime.kernel_cost import Card
from jaxtrain.runtime.peak_flops import peak_flops

# name: (compute capability, cores, memory bytes, bandwidth B/s, shared memory per core, L2 bytes, clock GHz)
TARGETS = {
    "h200": ((9, 0), 132, 151_397_597_184, 4_800_000_000_000, 233_472, 52_428_800, 1.98),
    "h100": ((9, 0), 132, 85_028_896_768, 3_350_000_000_000, 233_472, 52_428_800, 1.98),
    "a100": ((8, 0), 108, 85_098_971_136, 2_039_000_000_000, 167_936, 41_943_040, 1.41),
    "a6000": ((8, 6), 84, 51_041_271_808, 768_000_000_000, 102_400, 6_291_456, 1.80),
    "l40s": ((8, 9), 142, 47_697_362_944, 864_000_000_000, 102_400, 100_663_296, 2.52),
}
# B/s of the link between the GPUs of one machine, and of one GPU's share of the network between machines
LINKS = {"h200": 450e9, "h100": 450e9, "a100": 300e9, "a6000": 28e9, "l40s": 28e9}
NETWORK = {"h200": 50e9, "h100": 50e9, "a100": 25e9, "a6000": 12.5e9, "l40s": 12.5e9}
# Device kinds by which jax (from 0.11 on) knows the GPU that a Triton kernel is lowered for, by compute capability
_KINDS = {(8, 0): "NVIDIA A100", (8, 6): "NVIDIA A10", (8, 9): "NVIDIA L40", (9, 0): "NVIDIA H100"}
FLAGS = (
    "--xla_gpu_enable_triton_gemm=false",  # its tile sizes are autotuned on a real device
    "--xla_gpu_autotune_level=0",
)


def prepare() -> None:
    """Set the options that the GPU compiler needs; call it before jax uses a device. Raises UserError without the
    plug-in."""
    if not list(_plugin_folders()):
        raise UserError("plan: jax's CUDA compiler is not installed; pip install 'jaxtrain[plan]'")
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
    """Return descriptions of `count` GPUs of one kind on `hosts` machines (by default 8 per machine)."""
    if target not in TARGETS:
        raise UserError(f"--target {target}: unknown; known here: {', '.join(TARGETS)}")
    hosts = hosts or -(-count // 8)
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


def memory_bytes(target: str) -> int:
    """Return the bytes of one GPU that a program can use; the driver and the runtime take about 3 %."""
    return int(TARGETS[target][2] * 0.97)


def card(target: str, hosts: int) -> Card:
    """Return the peaks of a target GPU, in a run on so many machines."""
    kind = target.upper().replace("A6000", "RTX A6000")

    def peak(dtype: Any, matmul: str) -> float:
        found = peak_flops(kind, dtype, matmul)
        if found is None:
            raise UserError(f"--target {target}: its peak in {dtype} is not known")
        return found

    half, single, plain = peak("bfloat16", "default"), peak("float32", "default"), peak("float32", "highest")
    _, cores, _, bandwidth, *_ = TARGETS[target]
    link = LINKS[target] if hosts == 1 else min(LINKS[target], NETWORK[target])
    return Card(half, single, plain, bandwidth, link, cores)


def _describe(target: str) -> str:
    """Return the GPU's public figures in the format that XLA's GPU compiler reads (GpuTargetConfigProto)."""
    (major, minor), cores, memory, bandwidth, shared, l2, clock = TARGETS[target]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {shared - 1024} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{_KINDS[major, minor]}"
"""
