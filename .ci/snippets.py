"""Write what README, docs and examples show as Python into build/snippets, for pyright: line N there is line N here."""

import json
import pathlib
import re
import shutil
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
SNIPPETS = ROOT / "build/snippets"
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md")
# What a page's fragments leave out: its Trainer and config are ours until it imports others.
PRELUDE = (
    "import torch, jaxtrain; from torch import nn; from torch.utils.data import DataLoader; "
    "from jaxtrain import Trainer, TrainingConfig, load_config; trainer = Trainer()"
)
UNCHECKED = (
    "UndefinedVariable",
    "Redeclaration",
    "PossiblyUnboundVariable",
    "OptionalMemberAccess",
    "OptionalSubscript",
)
RULES = ", ".join(["# pyright: basic", *(f"report{rule}=false" for rule in UNCHECKED)])


def write() -> int:
    """Replace build/snippets; return the number of files. The blocks of a page are one program, in their order."""
    shutil.rmtree(SNIPPETS, ignore_errors=True)
    for page in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        _save(page, python_of(page.read_text()))
    for path in sorted((ROOT / "examples").rglob("*.py")):
        _save(path, path.read_text())
    for path in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(cell) for cell in cells)
        _save(path, re.sub(r"^(\s*)[!%].*$", r"\1pass", text, flags=re.M))
    return len([*SNIPPETS.rglob("*.py")])


def python_of(page: str) -> str:
    """Return a page's Python blocks at their lines; everything else is blank, and the prelude is the first line."""
    lines = [""] * len(page.splitlines())
    for block in re.finditer(r"^ *```python\n(.*?)^ *```", page, re.M | re.S):
        first = page[: block.start(1)].count("\n")
        for number, line in enumerate(textwrap.dedent(block[1]).splitlines()):
            lines[first + number] = line
    return "\n".join([PRELUDE, *lines[1:]]) if any(lines) else ""


def source(path: pathlib.PurePath) -> str:
    """Return the page or example that a file of build/snippets was written from."""
    name = str(path.relative_to("build/snippets"))
    return name if (ROOT / name).exists() else name.removesuffix(".py")


def _save(path: pathlib.Path, text: str) -> None:
    if not text:
        return
    name = path.relative_to(ROOT)
    file = SNIPPETS / (name if name.suffix == ".py" else f"{name}.py")
    file.parent.mkdir(parents=True, exist_ok=True)
    attribute_checks = "reportAttributeAccessIssue=true"  # off in the product, whose tests see to it
    file.write_text(f"{text}\n{RULES}, {attribute_checks}\n")
