"""The documentation builds without a broken link, and its reference is that of the settings as they are."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from jaxtrain import load_config

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_docs_build_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", ["reference", "operators"])
def test_the_tables_of_config_keys_and_operators_are_as_the_code_has_them(page):
    command = [sys.executable, f"docs/generate_{page}.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, f"run `python docs/generate_{page}.py` {result.stderr}"


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [*re.findall(r"^\| `([^`]+)`", page, re.M), *re.findall(r"```text\n(.*?)```", page, re.S)]
    files = [path for package in ("jaxtrain", "torch_bridge") for path in (ROOT / package).rglob("*.py")]
    code = _words("".join(path.read_text() for path in files))
    parts = {part.strip() for text in quoted for part in _words(text).split("|")}
    put_together = {"Unable to load cuDNN", "the training step would compile again"}  # by a library, from a name
    wanted = {part for part in parts if len(part) > 17} - put_together
    assert len(wanted) >= 30
    assert {part for part in wanted if part not in code} == set()


def _words(text: str) -> str:
    """Runs of words, with | for all else: numbers, names, braces. The parts of a broken string are joined."""
    joined = re.sub(r'"\s*\n\s*f?"', "", text).replace("`", "")
    return re.sub(r"[^A-Za-z' ]+", "|", " ".join(joined.split(" ")))


def test_the_readmes_python_runs_as_it_stands(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from jaxtrain.systems.digits.torch_twin import DigitsViT

    monkeypatch.chdir(tmp_path)
    own, back = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    namespace: dict = {}
    exec(own, namespace)
    assert namespace["trainer"].evaluate()["loss"] < 0.1
    weights = pathlib.Path("runs/digits/exports/best.pt")  # the quick start writes it; here a twin's own
    weights.parent.mkdir(parents=True)
    torch.save(DigitsViT(load_config("configs/digits.yaml").model).state_dict(), weights)
    exec(back, namespace)
    assert namespace["module"](torch.zeros(2, 1, 8, 8)).shape == (2, 10)
