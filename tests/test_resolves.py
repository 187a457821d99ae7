"""What an installer takes for `jaxtrain[cuda,torch]`. Nothing but the indexes' metadata is fetched."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
UNREACHABLE = re.compile(r"dns error|failed to fetch|network|offline|timed out", re.IGNORECASE)


OTHERS = [pytest.param(version, marks=pytest.mark.slow) for version in ("3.11", "3.13", "3.14")]


@pytest.mark.parametrize("python", ["3.12", *OTHERS])
def test_torch_and_jax_share_one_cuda(python):
    uv = shutil.which("uv", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv resolves; it is not installed")
    command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", "pyproject.toml"]
    command += ["--extra", "cuda", "--extra", "torch"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    versions = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    assert {"torch", "nvidia-nccl-cu13"} <= versions.keys()
    assert versions["jax-cuda13-plugin"] == versions["jaxlib"]
    assert {name for name in versions if name.endswith(("-cu12", "-cu11"))} == set()
