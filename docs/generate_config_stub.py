"""Write jaxtrain/config.pyi, the settings as type checkers and editors read them.

pydantic's own signature knows neither the flat names (`learning_rate=`) nor that a dict may stand for a section
(`optim={"lr": 1e-4}`). With the stub, both are checked and completed, and a misspelt name is an error before the script
runs. Everything in it comes from config.py: annotations, defaults, and the comment beside a field.
`python docs/generate_config_stub.py` writes it, `--check` compares.
"""

import ast
import pathlib
import sys

from generate_reference import comments

from jaxtrain import config, task

SOURCE = pathlib.Path(config.__file__)
STUB = SOURCE.with_suffix(".pyi")
HEAD = '''"""The settings, as type checkers and editors read them. Written by `python docs/generate_config_stub.py`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import BaseModel
'''
LR = ("OptimConfig", "lr")  # takes "auto", too: a range test finds it
MIXED = ("use_mixed_precision", "mixed_precision")  # True, False and accelerate's "no" are policies, too


def stub() -> str:
    tree = ast.parse(SOURCE.read_text())
    parts = [HEAD]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            parts.append(_constant(node))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            parts.append(_function(node))
        elif isinstance(node, ast.ClassDef):
            parts.append(_section(node) if _is_section(node.name) else _class(node))
    return "\n".join(part for part in parts if part) + "\n"


def _is_section(name: str) -> bool:
    kind = getattr(config, name, None)
    return isinstance(kind, type) and issubclass(kind, config.Section) and kind is not config.Section


def _constant(node: ast.Assign) -> str:
    name = node.targets[0].id
    value = getattr(config, name)
    kinds = {int: "int", tuple: "tuple[Any, ...]", dict: "dict[str, str]"}
    return f"{name}: {kinds[type(value)]}\n"


def _function(node: ast.FunctionDef, indent: str = "", settings: str = "") -> str:
    """settings: the parameters of a method that takes what its class takes, `**settings`."""
    decorators = [f"{indent}@{ast.unparse(one)}\n" for one in node.decorator_list]
    doc = ast.get_docstring(node)
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args)
    if node.args.kwarg is not None and node.args.kwarg.arg == "settings":
        arguments = f"\n        cls,\n        *,\n{settings}    "
    head = f"{''.join(decorators)}{indent}def {node.name}({arguments}){returned}:"
    return f'{head}\n{indent}    """{_indented(doc, indent + "    ")}"""\n' if doc else f"{head} ...\n"


def _indented(doc: str, indent: str) -> str:
    lines = doc.splitlines()
    end = f"\n{indent}" if len(lines) > 1 else ""
    return "\n".join([lines[0], *(indent + line if line else "" for line in lines[1:])]) + end


def _class(node: ast.ClassDef) -> str:
    """A class that holds no settings."""
    bases = ", ".join(map(ast.unparse, node.bases))
    return f'class {node.name}{f"({bases})" if bases else ""}:\n    """{ast.get_docstring(node)}"""\n'


def _section(node: ast.ClassDef) -> str:
    """A section's class, and the dict that may stand for it."""
    meanings = comments(getattr(config, node.name))
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    typed, shown, parameters = [], [], []
    for field in fields:
        name, meaning = field.target.id, meanings.get(field.target.id, "")
        doc = f'    """{meaning.replace(chr(92), chr(92) * 2)}"""\n' if meaning else ""
        typed.append(f"    {name}: {_accepted(node.name, name, field.annotation)}\n")
        shown.append(f"    {name}: {ast.unparse(field.annotation)} = ...\n{doc}")
        parameters.append(
            f"        {name}: {_accepted(node.name, name, field.annotation)} = {_default(node.name, name)},\n"
        )
    if node.name == "TrainingConfig":
        parameters += [f"        {name}: {_flat(name)} = ...,\n" for name in config.FLAT_NAMES]
    public = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    doc = ast.get_docstring(node)
    parts = [
        ""
        if node.name == "TrainingConfig"
        else f"class {_options(node.name)}(TypedDict, total=False):\n{''.join(typed)}\n",
        f"class {node.name}(Section):\n",
        f'    """{_indented(doc, "    ")}"""\n\n' if doc else "",
        *shown,
        f"\n    def __init__(\n        self,\n        *,\n{''.join(parameters)}    ) -> None: ...\n",
        *(_function(one, "    ", "".join(parameters)) for one in public),
        *(_task_sections() if node.name == "TrainingConfig" else ()),
    ]
    return "".join(parts)


def _task_sections() -> list[str]:
    """Return the sections that the shipped tasks add: `load_config("configs/digits.yaml").model`."""
    added = {name for one in task.task_names() for name in task.find_task(one).sections}
    lines = '    @property\n    def {}(self) -> Any:\n        """Section of tasks that have it."""\n'
    return [lines.format(name) for name in sorted(added - set(config.TrainingConfig.model_fields))]


def _options(name: str) -> str:
    return f"{name.removesuffix('Config')}Options"


def _accepted(section: str, name: str, annotation: ast.expr) -> str:
    """What a setting may be set to: pydantic takes a Path for a text, a list for a tuple, a dict for a section."""
    return "float | Literal['auto']" if (section, name) == LR else _union(annotation)


def _union(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.BinOp):
        return f"{_union(annotation.left)} | {_union(annotation.right)}"
    if isinstance(annotation, ast.Subscript):
        kind, inner = ast.unparse(annotation.value), annotation.slice
        if kind == "Annotated":
            return _union(inner.elts[0])
        if kind == "tuple":
            return f"Sequence[{_union(inner.elts[0])}]"
        if kind == "dict":
            return f"Mapping[str, {_union(inner.elts[1])}]"
    text = ast.unparse(annotation)
    if text == "str":
        return "str | pathlib.PurePath"
    return f"{text} | {_options(text)}" if _is_section(text) else text


def _default(section: str, name: str) -> str:
    default = getattr(config, section).model_fields[name].default
    plain = default is None or isinstance(default, bool | int | float | str)
    return repr(default) if plain else "..."


def _flat(name: str) -> str:
    *sections, leaf = config.FLAT_NAMES[name].split(".")
    kind = config.TrainingConfig
    for section in sections:
        kind = kind.model_fields[section].annotation
    body = next(one for one in ast.parse(SOURCE.read_text()).body if getattr(one, "name", "") == kind.__name__).body
    field = next(one for one in body if isinstance(one, ast.AnnAssign) and one.target.id == leaf)
    accepted = _accepted(kind.__name__, leaf, field.annotation)
    return f"bool | Literal['no'] | {accepted}" if name in MIXED else accepted


if __name__ == "__main__":
    text = stub()
    if "--check" in sys.argv:
        sys.exit(STUB.read_text() != text)
    STUB.write_text(text)
