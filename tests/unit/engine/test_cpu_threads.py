"""shard.threads: how many threads XLA's CPU backend computes with, in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

COUNTED = """
import pathlib, sys
from jaxtrain.runtime import cpu_threads
import jax
with cpu_threads.limited(int(sys.argv[1])):
    jax.devices()
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"))
with cpu_threads.limited(int(sys.argv[2])):
    pass
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, on Linux")
@pytest.mark.parametrize(("threads", "later"), [(1, 1), (3, 1)])
def test_so_many_threads_compute_and_a_later_wish_is_not_passed_over(threads, later):
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    told = subprocess.run(
        [sys.executable, "-c", COUNTED, str(threads), str(later)], env=env, capture_output=True, text=True, check=True
    )
    assert int(told.stdout) == threads
    assert ("shard.threads=1 has no effect" in told.stderr) == (later != threads)
