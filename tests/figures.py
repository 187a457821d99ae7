"""Figures with a unit of time, memory, speed or share in README and docs, and where each comes from.

A figure is traced to a text of a file of the repository that holds it: a result (benchmarks/results/*.json), a constant of
the code, the head of a config (its command, cost and expected result), a test that asserts it. SOURCES has these, page
by page: the words around the figure -> the file and its text. STATED has what is no measurement, with the reason.
The pages of GENERATED are written from results by a command, and compared with them by a test.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
GENERATED = {  # page -> the command that writes it
    "docs/benchmarks.md": "python -m benchmarks.page",
    "docs/certificates.md": "python -m benchmarks.certificates",
    "docs/public_trainings.md": "python -m benchmarks.public_trainings",
    "docs/drop_in_flags.md": "python docs/generate_drop_in_flags.py",
    "docs/operators.md": "python docs/generate_operators.py",
    "docs/reference.md": "python docs/generate_reference.py",
}
UNIT = (
    "ms|us|s|min|h|%|MB|GB|TB|kB|KB|MiB|GiB|KiB|(?:TB|GB|MB)/s|(?:samples|tokens|steps)/s|times|x(?! ?[0-9])|"
    "milliseconds?|seconds?|minutes?|hours?|days?"
)
FIGURE = re.compile(rf"(?<![\w.,/:-])([0-9][0-9,]*(?:\.[0-9]+)?)(?: |-)(?:CPU )?(?:{UNIT})(?![\w/])|(?<![\w.])[0-9.]+%")


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: pathlib.Path) -> str:
    """A page without its code, its links' targets and what a command writes into it."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"<!-- (\w+) begins.*?<!-- \1 ends -->", "", text, flags=re.S)
    return re.sub(r"\]\([^)]*\)", "]", text)


def figures(page: pathlib.Path) -> list[str]:
    """Each figure of a page with the words around it."""
    text = " ".join(prose(page).split())
    return [text[max(0, match.start() - 60) : match.end() + 30] for match in FIGURE.finditer(text)]
