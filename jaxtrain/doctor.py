"""Report this machine's devices, precision support and versions: `python -m jaxtrain.doctor`."""

import argparse
import importlib.metadata
import os
import platform
import shutil
from typing import Any

from jaxtrain import commands, script_doctor
from jaxtrain.errors import install

CORE = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pydantic", "safetensors")
OPTIONAL = {  # module -> what needs it
    "torch": "torch Datasets and .pt exports",
    "transformers": "the text systems",
    "PIL": "hjepa",
    "matplotlib": "the picture of jaxtrain.lr_find",
    "wandb": "tracking.wandb",
    "mlflow": "tracking.mlflow",
    "optuna": "jaxtrain.tune",
}
LAUNCHERS = ("JAXTRAIN_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "JOB_COMPLETION_INDEX")
ACCELERATOR = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_", "JAX_", "CUDA_VISIBLE_DEVICES", "NCCL_")


def main(argv: commands.Arguments = None) -> int:
    about = "Report devices, precision support and versions; or what of a training script compiles."
    p = commands.parser("doctor", about, "python -m jaxtrain.doctor --json")
    p.add_argument("--script", metavar="F", help="run this script up to its first updates; say what compiles")
    p.add_argument("arguments", nargs="*", help="with --script, after --: the script's arguments")
    commands.add_json(p)
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> None:
    if arguments.script is not None:
        arguments.found = found = script_doctor.examine(arguments.script, arguments.arguments)
        if not arguments.json:
            print("\n".join(script_doctor.describe(found)))
        return
    commands.quiet_jax()
    arguments.found = found = examine()
    if arguments.json:
        return
    for title, values in found.items():
        print(title)
        lines = values.items() if isinstance(values, dict) else ((f"{i}.", v) for i, v in enumerate(values, 1))
        for name, value in lines:
            print(f"  {name:<24}{value}")
    if not found["advice"]:
        print("  nothing to mend")


def examine() -> dict[str, Any]:
    """Return the whole report as plain values; "advice" holds one sentence per problem to fix."""
    found = {
        "machine": machine(),
        "versions": versions(),
        "devices": devices(),
        "precision": precision(),
        "compile cache": cache(),
        "launch": launch(),
    }
    return {**found, "advice": advice(found)}


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{_memory_bytes() / 1e9:.1f} GB",
        "disk here": f"{shutil.disk_usage('.').free / 1e9:.1f} GB free",
    }


def versions() -> dict[str, str]:
    known = {name: importlib.metadata.version(name) for name in CORE}
    providers = importlib.metadata.packages_distributions()  # the module mlflow comes from mlflow or mlflow-skinny
    for module, purpose in OPTIONAL.items():
        names = providers.get(module)
        known[module] = importlib.metadata.version(names[0]) if names else f"not installed ({purpose})"
    return known


def devices() -> dict[str, str]:
    import jax

    from jaxtrain.runtime.devices import all_devices, cuda_version, formats

    all_devices()  # raises with the reason if there are none
    found = {"backend": jax.default_backend(), "count": str(jax.local_device_count())}
    if version := cuda_version():
        found["CUDA version"] = version
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        limit = f", {stats['bytes_limit'] / 1e9:.1f} GB for JAX" if "bytes_limit" in stats else ""
        capability = getattr(device, "compute_capability", None)
        known = f", compute capability {capability}" if capability else ""
        known += "".join(f", {name} {'yes' if there else 'no'}" for name, there in formats(capability).items() if known)
        found[str(device)] = device.device_kind + known + limit
    return found


def precision() -> dict[str, str]:
    """Return, by policy, if a matrix product in its dtype is right here, and the device's peak if it is known."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.runtime.peak_flops import peak_flops
    from jaxtrain.runtime.precision import POLICIES

    kind, found = jax.devices()[0].device_kind, {}
    for name, policy in POLICIES.items():
        if policy.float8:
            found[name] = eight_bits()
            continue
        ones = jnp.ones((16, 16), policy.compute)
        right = float((ones @ ones)[0, 0]) == 16.0
        peak = peak_flops(kind, policy.compute)
        found[name] = ("works" if right else "gives wrong products") + (
            f", peak {peak / 1e12:g} TFLOP/s" if peak else ""
        )
    return found


def eight_bits() -> str:
    """Say in words if 8-bit matrix products run here."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.nn import float8, fused_attention

    device = jax.devices()[0]
    lacking = float8.lacking(device.platform, fused_attention.capability() if device.platform == "gpu" else None)
    if lacking is not None:
        return f"not here: {lacking}"
    ones = jnp.ones((16, 16), jnp.bfloat16)
    right = float(float8.product(ones, ones)[0, 0]) == 16.0
    return ("works" if right else "gives wrong products") + (", by emulation" if device.platform == "cpu" else "")


def cache() -> dict[str, str]:
    from jaxtrain.runtime import compile_cache

    folder = compile_cache.folder()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "folder": str(folder),
        "writable": "yes" if os.access(existing, os.W_OK) else "no",
        "holds": f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB",
    }


def launch() -> dict[str, str]:
    """Return the launcher that a run would recognise, and the environment variables it would read."""
    from jaxtrain.errors import UserError
    from jaxtrain.runtime.launch import detect

    try:
        recognised = str(detect())
    except UserError as error:
        recognised = f"contradictory: {error}"
    seen = {key: value for key, value in sorted(os.environ.items()) if key.startswith(LAUNCHERS + ACCELERATOR)}
    return {"recognised": recognised, **seen}


def advice(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["devices"]["backend"] == "cpu" and shutil.which("nvidia-smi"):
        lines.append(f"nvidia-smi is here but JAX sees no GPU: {install('cuda')}, and unset JAX_PLATFORMS")
    if found["compile cache"]["writable"] == "no":
        lines.append("the compile cache cannot be written: set JAX_COMPILATION_CACHE_DIR to a local folder")
    if found["launch"]["recognised"].startswith("contradictory"):
        lines.append(found["launch"]["recognised"])
    if any(value.startswith("gives wrong") for value in found["precision"].values()):
        lines.append("a precision gives wrong products: update the driver, or take precision.policy=fp32")
    return lines


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    commands.start(main)
