"""What a wheel holds: the packages, their data and the command; nothing else. tests/chaos/packaging.py installs it."""

import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

from tests.chaos.packaging import copy_tracked

ROOT = pathlib.Path(__file__).parents[1]
BUILD = "import setuptools.build_meta as backend, sys; print(backend.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_tracked(source)
    done = subprocess.run([sys.executable, "-c", BUILD, dist], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        yield archive


def test_it_holds_two_packages_with_their_types_and_nothing_of_tests_or_benchmarks(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"jaxtrain", "torch_bridge"}
    assert {"jaxtrain/py.typed", "jaxtrain/config.pyi", "torch_bridge/py.typed"} <= set(names)


def test_it_holds_every_module_of_the_packages(wheel):
    wanted = {
        str(path.relative_to(ROOT)) for name in ("jaxtrain", "torch_bridge") for path in (ROOT / name).rglob("*.py")
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == wanted


def test_it_holds_every_config_with_the_repositorys_bytes(wheel):
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert wheel.read(f"jaxtrain/{path.relative_to(ROOT)}") == path.read_bytes()


def test_it_brings_the_console_command_and_the_licence(wheel):
    texts = {pathlib.Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info" in name}
    assert {"jaxtrain = jaxtrain.__main__:main", "jxt = jaxtrain.__main__:main"} <= set(
        texts["entry_points.txt"].splitlines()
    )
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()


def test_a_config_of_the_package_is_found_in_a_folder_without_one(tmp_path, monkeypatch):
    from jaxtrain import config_io

    monkeypatch.chdir(tmp_path)
    assert config_io.load("configs/digits_tiny.yaml")[1].task == "digits.classify"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/digits_tiny.yaml").write_text("task: digits.classify\nseed: 7\n")
    assert config_io.load("configs/digits_tiny.yaml")[1].seed == 7


def test_one_version_of_the_project_and_of_its_linter_stands_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()
    linter = re.search(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.M).group(1)
    assert f"rev: v{linter}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
