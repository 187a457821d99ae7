"""Write docs/reference.md, every config key with its type, default and meaning: `python docs/generate_reference.py`.

The text comes from the settings classes themselves: the comment beside a field is its meaning.
"""

import ast
import inspect
import pathlib
import re
import sys
import textwrap
import tokenize
import types
import typing
from io import StringIO

from jaxtrain import config, task
from jaxtrain.config import Section

PAGE = pathlib.Path(__file__).with_name("reference.md")
HEAD = """# Every config key

One table per section; `section.key=value` on the command line overrides the YAML file. A key that is not here is
refused with the nearest that is. `python docs/generate_reference.py` writes this page from the settings classes.

Editors complete and check the keys of a YAML file that begins with `# yaml-language-server: $schema=PATH`, where PATH
leads to `configs/schema.json`.
"""


def page() -> str:
    parts = [HEAD, "## The core's sections\n"]
    known: dict[str, type] = {}
    for name, field in config.TrainingConfig.model_fields.items():
        if _is_section(field.annotation):
            known[name] = field.annotation
            parts += _tables(name, field.annotation)
    parts.insert(2, _table("top level", config.TrainingConfig, skip=set(known)))
    shown: dict[type, str] = {}
    for name in task.task_names():
        sections = task.find_task(name).sections
        if sections:
            parts.append(f"## `task: {name}`\n")
        for section, kind in sections.items():
            if kind in shown:
                parts.append(f"### `{section}`\n\nAs for `{shown[kind]}`.\n")
            else:
                parts += _tables(section, kind, without=known.get(section))
                shown[kind] = name
    return "\n".join(parts)


def _tables(name: str, kind: type, without: type | None = None) -> list[str]:
    """A section's own keys, then those of the sections inside it. without: the core's section that it extends."""
    fields = {key: field for key, field in kind.model_fields.items() if without is None or _own(key, field, without)}
    inner = {key: field.annotation for key, field in fields.items() if _is_section(field.annotation)}
    parts = [_table(name, kind, set(kind.model_fields) - set(fields) | set(inner))]
    return [part for part in parts if part] + [t for k, s in inner.items() for t in _tables(f"{name}.{k}", s)]


def _own(key: str, field, without: type) -> bool:
    old = without.model_fields.get(key)
    return old is None or (old.annotation, old.default) != (field.annotation, field.default)


def _table(name: str, kind: type, skip: set[str]) -> str:
    told = comments(kind)
    rows = [
        f"| `{key}` | {_type(field.annotation)} | {_default(field)} | {_escaped(told.get(key, ''))} |"
        for key, field in kind.model_fields.items()
        if key not in skip
    ]
    if not rows:
        return ""
    heading = f"### {name}\n" if name == "top level" else f"### `{name}`\n"
    return "\n".join([heading, "| key | type | default | |", "|---|---|---|---|", *rows, ""])


def comments(kind: type) -> dict[str, str]:
    """Field -> the comment on its line, of the class and those it extends."""
    told: dict[str, str] = {}
    for cls in reversed([c for c in kind.__mro__ if issubclass(c, Section) and c is not Section]):
        source = textwrap.dedent(inspect.getsource(cls))
        tokens = tokenize.generate_tokens(StringIO(source).readline)
        comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = range(node.lineno, node.end_lineno + 1)
                told[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return told


def _is_section(annotation) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _type(annotation) -> str:
    """The types and words that a setting takes."""
    return " ".join(f"`{_escaped(word)}`" for word in _alternatives(annotation))


def _alternatives(annotation) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [word for one in typing.get_args(annotation) for word in _alternatives(one)]
    text = annotation.__name__ if type(annotation) is type else str(annotation)
    text = re.sub(r"typing\.|(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    return [text.replace("NoneType", "null").replace("None", "null")]


def _default(field) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    shown = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
    return f"`{str(shown) or '(empty)'}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != text)
    PAGE.write_text(text)
