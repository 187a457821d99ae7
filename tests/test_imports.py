"""Importing the project changes nothing in the process: not its environment, signals, memory, nor JAX."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="every module is imported")
ROOT = pathlib.Path(__file__).parents[1]

PROBE = """
import ctypes, gc, importlib, json, logging, os, random, signal, sys, threading, warnings

exists, calls = os.path.exists, []
os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)  # a machine with a GPU

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        calls.append(name)  # mallopt
        return super().__getattr__(name)

ctypes.CDLL = Library

def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").split(".")[0] in ("jaxtrain", "torch_bridge"):
                raise

def state():
    import jax, numpy, torch
    traced = jax.jit(lambda key: jax.random.bits(key, (4,))).trace(jax.random.key(0))
    return {
        "environment": dict(os.environ),
        "signals": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
        "C functions": [name for name in calls if name.startswith("mall")],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.stdout), repr(logging.root.handlers)],
        "warnings": repr(warnings.filters),
        "random": [repr(random.getstate()), repr(numpy.random.get_state()), repr(torch.get_rng_state().tolist())],
        "torch": [torch.get_num_threads(), repr(torch.get_default_dtype()), torch.is_grad_enabled()],
        "jax settings": {name: repr(value) for name, value in jax.config.values.items()},
        "jax lowering": traced.lower(lowering_platforms=("cpu",)).as_text(),
    }

others, own = json.load(sys.stdin)
load(others)
state()  # the first trace of a program may load more
before = state()
load(own)
after = state()
from jaxtrain.runtime import gpus
loaded = [name for name in sys.modules if not name.startswith(("jaxtrain", "torch_bridge", "__main__"))]
changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
missing = [name for name in own if name not in sys.modules]
print(json.dumps({"changed": changed, "gpus": gpus.has_gpus(), "loaded": loaded, "missing": missing}))
"""


def own_modules():
    paths = [path for package in ("jaxtrain", "torch_bridge") for path in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.stem != "__main__"]
    drop_ins = {"jaxtrain.lightning", "jaxtrain.transformers"}  # they import another package's loop
    return [name.removesuffix(".__init__") for name in names if name not in drop_ins]


def probe(others, own):
    environ = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    command, asked = [sys.executable, "-c", PROBE], json.dumps([others, own])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    """Other people's modules change a process as they are imported, so they are imported before the comparison."""
    own = own_modules()
    return probe(probe([], own)["loaded"], own)


def test_importing_every_module_changes_nothing_in_the_process(found):
    assert found["changed"] == {}
    assert len(own_modules()) - len(found["missing"]) > 150


def test_a_machine_with_a_gpu_still_has_one_after_importing_every_module(found):
    assert found["gpus"]
