"""Docstrings lead with a verb."""

import ast
import pathlib

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
