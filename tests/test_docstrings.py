"""Docstrings lead with a verb, and the examples of the public names run."""

import ast
import doctest
import importlib
import inspect
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_no_docstring_begins_with_what_who_or_whether():
    wrong = []
    for path in (file for package in ("jaxtrain", "torch_bridge") for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and text.split()[0].strip(",.:;") in ("What", "Who", "Whether"):
                wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert wrong == []


def public_objects():
    """(dotted name, object) of every name on the page of the Python API."""
    for name in re.findall(r"^::: (\S+)", (ROOT / "docs/api.md").read_text(), re.M):
        module, _, attribute = name.rpartition(".")
        yield name, getattr(importlib.import_module(module), attribute)


def test_every_public_function_describes_each_of_its_parameters():
    pytest.importorskip("torch")
    missing = []
    for name, found in public_objects():
        if not inspect.isfunction(found):
            continue
        text = inspect.getdoc(found)
        section = re.search(r"Args:\n(.*?)(?:\n\n[A-Z]|\Z)", text, re.S)
        described = set(re.findall(r"^    (\w+): ", section.group(1), re.M)) if section else set()
        parameters = set(inspect.signature(found).parameters)
        if described != parameters and "others as in `compile`" not in text:
            missing.append(f"{name}: {sorted(parameters ^ described)}")
    assert missing == []


def test_the_examples_of_the_public_names_run(tmp_path, monkeypatch):
    for needed in ("torch", "torch_geometric"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    from torch_bridge.lowering.table import TABLE

    lowerings = dict(TABLE)
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    run = []
    for name, found in public_objects():
        for test in finder.find(found, name, globs={}):
            if test.examples:
                runner.run(test)
                run.append(name)
    for name in TABLE.keys() - lowerings.keys():  # an example registers one
        del TABLE[name]
    assert runner.failures == 0
    assert len(run) >= 15
