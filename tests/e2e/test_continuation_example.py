"""examples/continuation at a tiny size: half a run in JAX and half in torch DDP end where a whole one ends."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from jaxtrain import export, run
from tests import processes

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/continuation"
TINY = ("model.embed_dim=16", "model.depth=1", "model.num_heads=2", "train.steps=12")
JAX = ("checkpoint.every_steps=6", "shard.devices=1", "evaluation.every_epochs=null", "tracking.tensorboard=false")
distance = runpy.run_path(str(EXAMPLE / "distance.py"))["distance"]


def jax_run(folder: pathlib.Path, *more: str) -> None:
    assert run.main(["--config", str(EXAMPLE / "digits.yaml"), f"run.dir={folder}", *TINY, *JAX, *more]) == 0


def torch_ddp(output: pathlib.Path, until: int, *more: str) -> pathlib.Path:
    """Two processes."""
    given = ["--config", str(EXAMPLE / "digits.yaml"), *TINY, "--until", str(until), "--output", str(output), *more]
    processes.run(2, *given, module="examples.continuation.digits_ddp")
    return output


def test_jax_then_torch_ddp_ends_where_jax_does(tmp_path):
    jax_run(tmp_path / "run")
    half = export.export_training_state(tmp_path / "run", tmp_path / "half.pt", "6")
    whole = export.export_weights(tmp_path / "run", tmp_path / "whole.pt", "12")
    both = tmp_path / "both.pt"
    script = [str(EXAMPLE / "digits_ddp.py"), "--until", "12", "--output", str(both), "--checkpoint", str(half)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *script]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    config = ["--config", str(EXAMPLE / "digits.yaml"), *TINY]
    done = subprocess.run([*command, *config], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert distance(both, whole) < 1e-5


def test_torch_ddp_then_jax_ends_where_torch_does(tmp_path):
    half = torch_ddp(tmp_path / "half.pt", 6)
    whole = torch_ddp(tmp_path / "whole.pt", 12, "--checkpoint", str(half))
    jax_run(tmp_path / "run", f"init_from={half}")
    assert "went on from" in (tmp_path / "run" / "train.log").read_text()
    assert distance(export.export_weights(tmp_path / "run", tmp_path / "both.pt", "12"), whole) < 1e-5
