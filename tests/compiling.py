"""Choose how XLA compiles the programs of tests."""

import importlib.metadata
import os

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
UNOPTIMISED = "--xla_backend_optimization_level=0"
OPTIMISED: dict[str, int | bool] = {"xla_backend_optimization_level": 3}  # as compiler options
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have one kind of kernel
    UNOPTIMISED += " --xla_cpu_use_fusion_emitters=false"
    OPTIMISED |= {"xla_cpu_use_fusion_emitters": True}


def set_flags(*, optimised: bool) -> None:
    """Make eight fake devices. Unless `optimised`, let XLA emit slower code, which compiles in a third of the time.

    Flags that XLA_FLAGS holds already win.
    """
    flags = [*([] if optimised else UNOPTIMISED.split()), *os.environ.get("XLA_FLAGS", "").split(), EIGHT_DEVICES]
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(flags))  # a worker's are those of the process that started it


def child_environment() -> dict[str, str]:
    """Return the environment of a process on the CPU that has one device and compiles as this one does."""
    flags = os.environ.get("XLA_FLAGS", "").replace(EIGHT_DEVICES, "")
    return {"JAX_PLATFORMS": "cpu"} | os.environ | {"XLA_FLAGS": flags.strip()}
