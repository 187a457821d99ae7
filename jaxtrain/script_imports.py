"""The one import that a script of transformers', Lightning's or accelerate's changes, and the script with it."""

import ast
from typing import NamedTuple

_TRAINS = ("Train", "Accelerator", "Lightning", "Fabric")  # in names that a drop-in replaces

DROP_INS = {
    "trl": "trl", "sentence_transformers": "sentence_transformers", "transformers": "transformers",
    "lightning": "lightning", "lightning.pytorch": "lightning", "pytorch_lightning": "lightning",
    "accelerate": "accelerate",
}  # fmt: skip


class Change(NamedTuple):
    """A line to change. line: its number. now, then: its text."""

    line: int
    now: str
    then: str


def changes(source: str, library: str) -> list[Change]:
    """Return the import lines of a trainer's library that a script has to change, with the drop-in's; [] if it imports
    nothing of it, or not by lines of their own."""
    package = DROP_INS.get(library, "")
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and DROP_INS.get(node.module or "") == package:
            if not any(part in name.name for name in node.names for part in _TRAINS):
                continue
            now = lines[node.lineno - 1]
            then = now.replace(f"from {node.module} import", f"from jaxtrain.{package} import", 1)
        elif isinstance(node, ast.Import) and len(node.names) == 1 and DROP_INS.get(node.names[0].name) == package:
            name = node.names[0]
            if name.asname is None and "." in name.name:
                continue
            now = lines[node.lineno - 1]
            begin = now[: len(now) - len(now.lstrip())]
            then = f"{begin}import jaxtrain.{package} as {name.asname or name.name}"
        else:
            continue
        if then != now:
            found.append(Change(node.lineno, now.strip(), then.strip()))
    return sorted(found)


def changed(source: str, lines: list[Change]) -> str:
    """Return the script with these lines changed; every line keeps its number."""
    text = source.splitlines(keepends=True)
    for change in lines:
        text[change.line - 1] = text[change.line - 1].replace(change.now, change.then, 1)
    return "".join(text)
