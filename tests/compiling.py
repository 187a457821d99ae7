"""How XLA compiles what the tests run."""

import importlib.metadata
import os

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
UNOPTIMISED = "--xla_backend_optimization_level=0"
OPTIMISED: dict[str, int | bool] = {"xla_backend_optimization_level": 3}  # as compiler options
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have one kind of kernel
    UNOPTIMISED += " --xla_cpu_use_fusion_emitters=false"
    OPTIMISED |= {"xla_cpu_use_fusion_emitters": True}


def set_flags(*, optimised: bool) -> None:
    """Eight fake devices. Unless `optimised`, code that compiles in a third of the time, to be run a few times. What
    XLA_FLAGS says already wins."""
    flags = [*([] if optimised else [UNOPTIMISED]), os.environ.get("XLA_FLAGS", ""), EIGHT_DEVICES]
    os.environ["XLA_FLAGS"] = " ".join(flags)


def child_environment() -> dict[str, str]:
    """The environment of a process that sees the devices that there are, and compiles as this one does."""
    flags = os.environ.get("XLA_FLAGS", "").replace(EIGHT_DEVICES, "")
    return os.environ | {"XLA_FLAGS": flags.strip()}
