"""Write build/typings/transformers/__init__.pyi: the names of transformers that the checked files mention.

transformers' own `__init__.py` imports all its models with `*`, and pyright resolves each name of our `from
transformers import *`: 3,000 files, a minute of CPU time and 3 GB, after which it drops its cache again and again. The
stub imports the same classes from the same modules. A name that no checked file mentions cannot change a file's errors,
and one that transformers lacks is an error as before. pyproject.toml's stubPath points to it; users read the library.
"""

import ast
import importlib.util
import pathlib
import re
from collections.abc import Iterable, Iterator

STUB = pathlib.Path(__file__).parents[1] / "build/typings/transformers/__init__.pyi"
STAR = re.compile(r"^ +from \.(\w+) import \*$", re.M)
EXPORTS = re.compile(r"^__all__ = (\[.*?\])$", re.M | re.S)


def write(checked: Iterable[pathlib.Path]) -> list[str]:
    """Replace the stub; return its names, none without transformers."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        STUB.unlink(missing_ok=True)
        return []
    words = {word for path in checked for word in re.findall(r"\w+", path.read_text())}
    modules = {name: (module, original) for name, module, original in exports(pathlib.Path(found.origin))}
    names = sorted(words & {*modules})
    lines = [f"from transformers.{modules[name][0]} import {modules[name][1]} as {name}" for name in names]
    STUB.parent.mkdir(parents=True, exist_ok=True)
    STUB.write_text("\n".join(["__version__: str", *lines, ""]))
    return names


def exports(init: pathlib.Path) -> Iterator[tuple[str, str, str]]:
    """Yield each name that transformers' __init__.py imports for type checkers, its module and its name there."""
    body = ast.parse(init.read_text()).body
    shown = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in [*body, *(inner for block in shown for inner in block.body)]:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                if alias.name != "*":
                    yield alias.asname or alias.name, node.module, alias.name
                elif node.module == "models":
                    yield from _models(init.parent / "models")
                else:
                    raise SystemExit(f"{init}:{node.lineno}: {ast.unparse(node)}: extend .ci/transformers_stub.py")


def _models(folder: pathlib.Path) -> Iterator[tuple[str, str, str]]:
    for model in STAR.findall((folder / "__init__.py").read_text()):
        for module in STAR.findall((folder / model / "__init__.py").read_text()):
            public = EXPORTS.search((folder / model / f"{module}.py").read_text())
            if public is None:
                raise SystemExit(f"{folder}/{model}/{module}.py has no literal __all__ for .ci/transformers_stub.py")
            for name in ast.literal_eval(public[1]):
                yield name, f"models.{model}.{module}", name
