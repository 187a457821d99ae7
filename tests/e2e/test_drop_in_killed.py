"""A run of each drop-in that SIGKILL ends goes on from its last checkpoint with the bits of an uninterrupted one."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]


def run(kind: str, folder: pathlib.Path, killed_at: int = 0) -> int:
    command = [sys.executable, "-m", "tests.e2e.drop_in_runs", kind, str(folder), str(killed_at)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=900).returncode


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightning", "transformers", "accelerate"])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, kind):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    assert run(kind, tmp_path / "whole") == 0
    assert run(kind, tmp_path / "parts", killed_at=6) == -signal.SIGKILL
    assert not (tmp_path / "parts/weights.pt").exists()
    assert run(kind, tmp_path / "parts") == 0
    whole, parts = (torch.load(tmp_path / name / "weights.pt") for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], value) for key, value in parts.items())
    assert whole["body.1.num_batches_tracked"] == 12
