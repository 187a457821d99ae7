"""XLA's persistent compile cache, on by default, and a count of what it saved."""

import dataclasses
import os
import pathlib

import jax


@dataclasses.dataclass
class CompileCount:
    """Compilations since `watch`: requests, how many came from the cache, seconds spent."""

    requests: int = 0
    hits: int = 0
    seconds: float = 0.0

    def __str__(self):
        return f"{self.requests} programs, {self.hits} from the cache, {self.seconds:.1f} s"


def enable() -> pathlib.Path:
    """Use the folder of JAX_COMPILATION_CACHE_DIR, or ~/.cache/jaxtrain/xla, for everything however quick."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or home / "jaxtrain" / "xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def watch() -> CompileCount:
    """A count that goes on rising with every compilation of this process."""
    count = CompileCount()

    def on_event(name: str, **_):
        count.hits += name == "/jax/compilation_cache/cache_hits"

    def on_duration(name: str, seconds: float, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            count.requests += 1
            count.seconds += seconds

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    return count
