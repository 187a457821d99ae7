"""A process of its own that compiles programs into the compile cache. Unlike a thread in XLA's compiler it can be ended
at any time: Python cannot shut down around such a thread, and XLA does not let itself be interrupted."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO

import jax

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from jaxtrain.runtime.compile_process import main
main()
"""
NICENESS = 5  # torch's steps come first
_LENGTH_BYTES = 8


class CompileProcess:
    """Starts the process. Raises OSError if the machine does not let it.

    cache: folder of JAX's compile cache.
    """

    def __init__(self, cache: pathlib.Path):
        self._cache = str(cache)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": self._cache,  # part of the cache's keys
            "JAX_ENABLE_X64": str(jax.config.jax_enable_x64),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(sys.path)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the training's
        )

    def compile(self, exported: bytearray, donated: tuple[int, ...]) -> bool:
        """Compile a serialized `jax.export.Exported` into the cache; return False if the process has ended over it.
        donated: positions of the arguments that the program donates."""
        try:
            for message in (json.dumps(donated).encode(), exported):
                self._process.stdin.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
            self._process.stdin.flush()
            return self._process.stdout.read(1) == b"."
        except OSError:
            return False

    def end(self) -> None:
        """End the process at once, but not while it writes to the cache: JAX would keep half of an entry for good."""
        self._process.send_signal(signal.SIGSTOP)
        while self._writes():
            self._process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
            self._process.send_signal(signal.SIGSTOP)
        self._process.kill()
        self._process.wait()

    def _writes(self) -> bool:
        """Return True if the process has a file of the cache open; False without /proc (not Linux)."""
        for path in pathlib.Path(f"/proc/{self._process.pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(self._cache + os.sep):
                    return True
        return False


def called(program: Any, donated: tuple[int, ...]) -> Any:
    """Return a `jax.export.Exported` as a function of `jax.jit`, the same in each process."""
    return jax.jit(program.call, donate_argnums=donated)


def main() -> None:
    """Compile what comes on standard input, one `.` on standard output for each program, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whatever a library prints is no reply

    from jaxtrain.runtime import compile_cache

    compile_cache.enable()
    while donated := _next(sys.stdin.buffer):
        exported = bytearray(_next(sys.stdin.buffer))
        program = jax.export.deserialize(exported)
        positions, keywords = jax.tree.unflatten(program.in_tree, program.in_avals)
        called(program, tuple(json.loads(donated))).lower(*positions, **keywords).compile()
        replies.write(b".")


def _next(stream: BinaryIO) -> bytes:
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    return stream.read(length)
