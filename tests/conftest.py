"""Tests run on the CPU, share one compile cache and never touch the user's folders."""

import ast
import contextlib
import functools
import gc
import importlib.util
import os
import pathlib
import re
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
CACHE = pathlib.Path(
    os.environ.get("JAX_COMPILATION_CACHE_DIR", pathlib.Path(tempfile.gettempdir()) / "jaxtrain-tests")
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402

from tests import compiling  # noqa: E402

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
KEPT_BYTES = min(6 * 10**9, MEMORY // (2 * WORKERS))  # by a worker; then what is compiled and traced is given up
SLOW = ("e2e", "contract", "tuning")  # folders
gc.set_threshold(10_000, 10, 10)  # tracing makes objects by the million; looking through them was a sixth of the time


@pytest.fixture(scope="session", autouse=True)
def _compile_cache():
    from jaxtrain.runtime import compile_cache

    compile_cache.enable()
    compiling.load_once(programs=200)


@pytest.fixture(autouse=True)
def _small_worker():
    """Compiled programs pile up, and glibc keeps what they leave: gigabytes after a few hundred tests. What a test
    leaves behind is not looked through for garbage again and again: that took longer with every test."""
    yield
    gc.freeze()
    if _resident_bytes() > KEPT_BYTES:
        import jax

        from jaxtrain.runtime import host_memory

        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        host_memory.give_back()


@pytest.fixture
def optimised(monkeypatch):
    """Steps are compiled as a run's are: the test says that two programs compute the same bits."""
    import jax

    from jaxtrain.train.program import Program

    jit = lambda _, function, **options: jax.jit(function, compiler_options=compiling.OPTIMISED, **options)
    monkeypatch.setattr(Program, "jit", jit)


def pytest_addoption(parser):
    text = "programs optimised as a user's are; contract tests marked once_a_system: of every task"
    parser.addoption("--thorough", action="store_true", help=text)


def pytest_configure(config):
    compiling.set_flags(optimised=config.getoption("--thorough"))  # XLA reads them when it first computes
    text = "a contract test that one task of each system stands for, unless --thorough is given"
    config.addinivalue_line("markers", f"once_a_system: {text}")


def pytest_collection_modifyitems(config, items):
    """Groups of tests that share something follow one another, the folders of slow ones come first."""
    if not config.getoption("--thorough"):
        _keep_one_of_each_system(config, items)
    groups = {item: _group_of(item.nodeid) for item in items}
    first = {group: place for place, group in reversed(list(enumerate(groups.values())))}
    items.sort(key=lambda item: (item.path.parent.name not in SLOW, first[groups[item]]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A group stays on one worker. (xdist's own groups are without effect from pytest 9.2 on: pytest-xdist #1386.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group_of(nodeid)

    return ByGroup(config, log)


def _keep_one_of_each_system(config, items):
    seen, left_out = set(), []
    for item in [item for item in items if item.get_closest_marker("once_a_system")]:
        task = item.callspec.params["name"]
        claim = item.nodeid.replace(task, task.split(".")[0])
        if claim in seen:
            left_out.append(item)
        seen.add(claim)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _group_of(nodeid: str) -> str:
    """A file; among the contract tests a task, so that the claims about one share what was built for it."""
    file, _, case = nodeid.partition("::")
    task = re.search(r"\[(\w+\.\w+)", case) if file.startswith("tests/contract/") else None
    return task.group(1) if task else file


def pytest_handlecrashitem(crashitem, report, sched):
    """A worker that died says how: what it wrote last went with it."""
    with contextlib.suppress(Exception):  # execnet's own process, where it is one
        code = report.node.gateway._io.popen.wait(timeout=10)
        report.longrepr += f": exit code {code}; processes killed for memory on this machine: {_killed_for_memory()}"


def _killed_for_memory() -> str:
    counters = dict(line.split() for line in pathlib.Path("/proc/vmstat").read_text().splitlines())
    return counters.get("oom_kill", "unknown")


def _resident_bytes() -> int:
    statm = pathlib.Path("/proc/self/statm")  # Linux only
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0


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
        bases = [ROOT.joinpath(*name.split(".")) for name in own]
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
    from jaxtrain.systems.torch_module.torch_examples import declare_torchvision as declare

    declare()  # before anything imports timm or transformers
