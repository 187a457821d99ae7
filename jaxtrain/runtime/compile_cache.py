"""Enable XLA's persistent compile cache (on by default) and count compilations and cache hits."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import tempfile
from typing import Any

import jax
import jaxlib

HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"  # loading from the cache counts too


@dataclasses.dataclass
class Totals:
    """Compilation counts of the process so far."""

    requests: int = 0
    hits: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class CompileCount:
    """Compilations since `watch`: requests, hits and misses of the cache, seconds spent. The numbers keep counting."""

    start: Totals

    @property
    def requests(self) -> int:
        return _totals.requests - self.start.requests

    @property
    def hits(self) -> int:
        return _totals.hits - self.start.hits

    @property
    def misses(self) -> int:
        return self.requests - self.hits

    @property
    def seconds(self) -> float:
        return _totals.seconds - self.start.seconds

    def __str__(self):
        return f"{self.requests} programs, {self.hits} from the cache, {self.seconds:.1f} s"


_totals = Totals()
_listening = False


def enable() -> pathlib.Path | None:
    """Cache every compilation, however quick, in JAX_COMPILATION_CACHE_DIR or ~/.cache/jaxtrain/xla; return the folder.

    The cache holds machine code that will run in this process. So a folder that another user owns or could have written
    to is not used, and None is returned.
    """
    path = folder()
    reason = _made_private(path)
    jax.config.update("jax_compilation_cache_dir", None if reason else str(path))
    if reason:
        logging.getLogger("jaxtrain").warning("%s: %s; nothing is kept of what is compiled", path, reason)
        return None
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def folder() -> pathlib.Path:
    """Return the cache folder. It is local to the machine, because it also holds XLA's autotuning results, and a shared
    folder would be slow."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if given:
        return pathlib.Path(given).expanduser() if "HOME" in os.environ else pathlib.Path(given)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        home = pathlib.Path(home) if home else pathlib.Path.home() / ".cache"
    except RuntimeError:  # no HOME, and a user unknown to the system, as in a container
        home = pathlib.Path(tempfile.gettempdir()) / f"jaxtrain-cache-{os.geteuid()}"
    return home / "jaxtrain" / "xla"


def holds(lowered: Any) -> bool:
    """Return True if an earlier process has compiled this program into the cache. lowered: what
    `jax.jit(...).lower(...)` returns."""
    path = _mark(lowered)
    return path is not None and path.exists()


def note(lowered: Any) -> None:
    """Note for `holds`, here and in later processes, that the program is in the cache."""
    path = _mark(lowered)
    if path is not None:
        with contextlib.suppress(OSError):  # a full disk: it will be compiled again
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.touch()


def _mark(lowered: Any) -> pathlib.Path | None:
    """Return the file that stands for a program in the cache; None without a cache. JAX's own key is not public."""
    home = jax.config.jax_compilation_cache_dir
    if not home or not jax.config.jax_enable_compilation_cache:
        return None
    versions = jax.__version__, jaxlib.__version__, os.environ.get("XLA_FLAGS", ""), jax.devices()[0].device_kind
    digest = hashlib.sha256("\n".join((*versions, lowered.as_text())).encode()).hexdigest()
    return pathlib.Path(home) / "compiled" / digest


def _made_private(path: pathlib.Path) -> str:
    """Create the folder, accessible to its owner only. Return why it cannot be trusted, or an empty string."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        told = path.stat()
        if told.st_uid != os.geteuid():
            return f"the compile cache belongs to user {told.st_uid}, and what it holds would run here"
        if told.st_mode & 0o022:
            return (
                "others may write into the compile cache, and what it holds would run here. Delete it, or empty it and "
                f"chmod 700 {path}"
            )
        if told.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        return f"no folder for the compile cache: {error.strerror}"
    return ""


def watch() -> CompileCount:
    """Return a count of the compilations of this process from now on."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_listener(_on_event)
        jax.monitoring.register_event_duration_secs_listener(_on_duration)
        _listening = True
    return CompileCount(dataclasses.replace(_totals))


def _on_event(event: str, **_):
    _totals.hits += event == HIT


def _on_duration(event: str, duration_secs: float, **_):
    if event == COMPILED:
        _totals.requests += 1
        _totals.seconds += duration_secs
