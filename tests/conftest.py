"""Tests run on the CPU, share one compile cache and never touch the user's folders."""

import ast
import functools
import importlib.util
import os
import pathlib
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(tempfile.gettempdir()) / "jaxtrain-tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAXTRAIN_WAIT", "1")  # the same bits, and programs, in each run
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402

from tests import compiling  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _compile_cache():
    from jaxtrain.runtime import compile_cache

    compile_cache.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_lines_of_long_waits():
    """A busy machine would add them to what a test expects to be told."""
    from jaxtrain.runtime import waits

    waits.LONG_S = 600.0


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_end_with_their_file():
    yield
    import jax

    jax.clear_caches()  # hundreds of programs would take gigabytes


@pytest.fixture
def optimised(monkeypatch):
    """Compile steps as a user's run does: the test claims that two programs compute the same bits."""
    import jax

    from jaxtrain.train.program import Program

    jit = lambda _, function, **options: jax.jit(function, compiler_options=compiling.OPTIMISED, **options)
    monkeypatch.setattr(Program, "jit", jit)


def pytest_addoption(parser):
    parser.addoption("--optimised", action="store_true", help="compile every program as a user's run does")


def pytest_configure(config):
    compiling.set_flags(optimised=config.getoption("--optimised"))  # XLA reads them when it first computes


def pytest_ignore_collect(collection_path, config):
    """Without torch (the run with the newest jax) only the files that import nothing beyond the core are collected."""
    if not _TORCH_FREE or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if _needs_more(collection_path) else None


def pytest_report_header(config):
    return "torch is absent: test files that import torch or an extra are left out" if _TORCH_FREE else None


def _needs_more(path: pathlib.Path) -> bool:
    """Whether a file, or one of the project's own that it imports, imports what is not installed."""
    seen, waiting = set(), [path]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        names = _names(file)
        own = {name for name in names if name.split(".")[0] in ("tests", "jaxtrain", "torch_bridge", "benchmarks")}
        if any(importlib.util.find_spec(name.split(".")[0]) is None for name in names - own):
            return True
        parts = [name.split(".") for name in own]
        bases = {ROOT.joinpath(*part[:depth]) for part in parts for depth in range(1, len(part) + 1)}
        files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
        waiting += [file for file in files if file.is_file()]
    return False


@functools.cache
def _names(path: pathlib.Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    is_test = "tests" in path.relative_to(ROOT).parts  # a test runs its functions; the product's import lazily
    return frozenset(name for node in (ast.walk(tree) if is_test else tree.body) for name in _imported(node))


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


_TORCH_FREE = importlib.util.find_spec("torch") is None
if not _TORCH_FREE:
    from torch_bridge.torchvision_operators import declare_torchvision as declare

    declare()  # before anything imports timm or transformers
