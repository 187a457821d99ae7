"""Tests run on the CPU, share one compile cache and never touch the user's folders."""

import ast
import importlib.util
import os
import pathlib
import tempfile

CACHE = pathlib.Path(
    os.environ.get("JAX_COMPILATION_CACHE_DIR", pathlib.Path(tempfile.gettempdir()) / "jaxtrain-tests")
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _compile_cache():
    from jaxtrain.runtime import compile_cache

    compile_cache.enable()


def pytest_ignore_collect(collection_path, config):
    """Without torch (the run with the newest jax) only the files that import nothing beyond the core are collected."""
    if not _TORCH_FREE or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if _needs_more(collection_path) else None


def pytest_report_header(config):
    return "torch is absent: test files that import torch or an extra are left out" if _TORCH_FREE else None


def _needs_more(path: pathlib.Path) -> bool:
    names = {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text())) for name in _imported(node)}
    return any(importlib.util.find_spec(name) is None for name in names if name not in ("tests", "benchmarks"))


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


_TORCH_FREE = importlib.util.find_spec("torch") is None
if not _TORCH_FREE:
    from tests.e2e.torchvision_schemas import declare

    declare()  # before anything imports timm or transformers
