"""What a process does with memory that it freed."""

import json
import os
import subprocess
import sys

import pytest

TWO_THREADS = """
import ctypes, json, resource, threading
from jaxtrain.runtime import host_memory

host_memory.one_arena()
libc, size, faults = ctypes.CDLL(None), 100 * 2**20, []
libc.malloc.restype = ctypes.c_void_p

def use():
    memory = ctypes.c_void_p(libc.malloc(size))
    libc.memset(memory, 1, size)
    libc.free(memory)

def measure():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

with host_memory.kept():
    measure()
    measure()
measure()
print(json.dumps(faults))
"""


def page_faults(**environment):
    own = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", TWO_THREADS]
    return json.loads(subprocess.run(command, env=own | environment, check=True, capture_output=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_that_one_thread_freed_in_a_run_serves_the_next_and_goes_back_afterwards():
    first, second, afterwards = page_faults()
    assert first > 20_000  # 100 MB in pages of 4 KB
    assert second < 500
    assert afterwards > 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_malloc_settings_of_the_environment_are_left_alone():
    assert min(page_faults(MALLOC_ARENA_MAX="4")) > 20_000
