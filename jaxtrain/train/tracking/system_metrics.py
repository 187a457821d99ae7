"""Measure memory and utilisation of host and devices."""

import os
import pathlib
import shutil
import subprocess
import threading
import time

import jax

from jaxtrain.runtime.gpus import visible_gpus

GIGA = 1e9
SHORTEST_S = 0.5  # shortest time between two readings; sooner, the last one is returned again


class SystemMetrics:
    """System metrics for the log. On an NVIDIA GPU a thread asks `nvidia-smi` for the utilisation every `period_s`."""

    def __init__(self, period_s: float = 10.0):
        self.period_s = period_s
        self._cpu = self._cpu_seconds()
        self._last: dict[str, float] = {}
        self._utilisation: float | None = None
        self._closed = threading.Event()
        if jax.default_backend() == "gpu" and shutil.which("nvidia-smi"):
            threading.Thread(target=self._watch, name="jaxtrain-utilisation", daemon=True).start()

    def read(self) -> dict[str, float]:
        """Return memory in gigabytes (1e9 bytes), and utilisation of this process's devices and the machine's cores as
        fractions."""
        before, now = self._cpu, self._cpu_seconds()
        if self._last and now[1] - before[1] < SHORTEST_S:
            return self._last
        self._cpu = now
        values = {
            "system/host_memory_gb": _resident_bytes() / GIGA,
            "system/cpu_utilisation": (now[0] - before[0]) / max(now[1] - before[1], 1e-9) / (os.cpu_count() or 1),
        }
        stats = jax.local_devices()[0].memory_stats() or {}
        for name, key in (("memory", "bytes_in_use"), ("memory_peak", "peak_bytes_in_use")):
            if key in stats:
                values[f"system/device_{name}_gb"] = stats[key] / GIGA
        if self._utilisation is not None:
            values["system/device_utilisation"] = self._utilisation
        self._last = values
        return values

    def close(self) -> None:
        self._closed.set()

    @staticmethod
    def _cpu_seconds() -> tuple[float, float]:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system, time.monotonic()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", *_own_gpus()]
        while not self._closed.wait(self.period_s):
            answer = subprocess.run(query, capture_output=True, text=True, check=False)
            numbers = [float(line) for line in answer.stdout.split() if line.replace(".", "").isdigit()]
            if numbers:
                self._utilisation = sum(numbers) / len(numbers) / 100


def _own_gpus() -> list[str]:
    """Return nvidia-smi's arguments that select this process's GPUs: the machine may have others, used by others."""
    visible, own = visible_gpus(), [device.local_hardware_id for device in jax.local_devices()]
    names = [visible[i] for i in own if i is not None and i < len(visible)]
    return ["-i", ",".join(names)] if names else []


def _resident_bytes() -> float:
    statm = pathlib.Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
