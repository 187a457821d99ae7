"""How XLA compiles what the tests run."""

import collections
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
    flags = [*([] if optimised else UNOPTIMISED.split()), *os.environ.get("XLA_FLAGS", "").split(), EIGHT_DEVICES]
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(flags))  # a worker's are those of the process that started it


def child_environment() -> dict[str, str]:
    """The environment of a process that sees the devices that there are, and compiles as this one does."""
    flags = os.environ.get("XLA_FLAGS", "").replace(EIGHT_DEVICES, "")
    return os.environ | {"XLA_FLAGS": flags.strip()}


def load_once(programs: int) -> None:
    """The last `programs` that this process found in the compile cache are kept: a test that compiles what one before
    it compiled need not have XLA read it again, which takes as long as tracing it. A run of its own still does."""
    from jax._src import compilation_cache

    read, kept = compilation_cache.get_executable_and_time, collections.OrderedDict()

    def read_once(key, options, backend, devices, *callbacks):
        if any(callbacks):  # the program calls functions of the one who asks
            return read(key, options, backend, devices, *callbacks)
        place = (key, *(device.id for device in devices))
        found = kept.pop(place, None) or read(key, options, backend, devices, *callbacks)
        if found[0] is not None:
            kept[place] = found
        if len(kept) > programs:
            kept.popitem(last=False)
        return found

    compilation_cache.get_executable_and_time = read_once
