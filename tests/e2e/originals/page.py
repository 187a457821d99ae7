"""Run the Python blocks of a page of docs/originals in one namespace: `python -m tests.e2e.originals.page NAME`.

A fixture, `tests/e2e/originals/<name>.py`, stands in for data that is not public and keeps the sizes small: its
`BEFORE[n]` is called with the namespace before block n, its `AFTER[n]` after it.
"""

import importlib
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

PAGES = Path(__file__).parents[3] / "docs" / "originals"
_FENCE = re.compile(r"^<!-- (block|yaml) (\w+)(.*?)-->\n+^```(?:python|yaml)\n(.*?)^```", re.S | re.M)


class Block(NamedTuple):
    kind: str  # block: Python. yaml: a config
    number: str  # of the original's block; 1a, 1b, ... are parts of block 1
    note: str
    code: str


def blocks(name: str) -> list[Block]:
    """The blocks of a page that an HTML comment marks: `<!-- block 3 -->`, `<!-- yaml 1; task=hjepa.pretrain -->`."""
    found = _FENCE.findall((PAGES / f"{name}.md").read_text())
    return [Block(kind, number, note.strip(" :;\n"), code) for kind, number, note, code in found]


def originals_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of an original's README, unindented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.S | re.M)
    return [textwrap.dedent(code) for _, code in found]


def main(name: str) -> None:
    fixture = importlib.import_module(f"tests.e2e.originals.{name}")
    namespace: dict = {"__name__": "__page__"}
    python = [block for block in blocks(name) if block.kind == "block"]
    for block in python:
        fixture.BEFORE.get(int(block.number), lambda namespace: None)(namespace)
        exec(compile(block.code, f"{name}.md, block {block.number}", "exec"), namespace)
        fixture.AFTER.get(int(block.number), lambda namespace: None)(namespace)
        print(f"{name}.md: block {block.number} ran", flush=True)
    print(f"{name}.md: {len(python)} of {len(python)} blocks ran")


if __name__ == "__main__":
    main(sys.argv[1])
