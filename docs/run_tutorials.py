"""Execute the tutorials and keep their outputs: `python docs/run_tutorials.py [NAME ...]`.

A tutorial is a notebook of docs/tutorials, whose outputs are part of the site. Each runs in a process and an empty
folder of its own. `--check` writes nothing and exits with 1 where a notebook prints something else than it shows;
figures may differ by a tenth, rounding errors by more, and pictures are only counted.
"""

import argparse
import hashlib
import os
import pathlib
import re
import sys
import tempfile

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs/tutorials"
NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
TOLERANCE, ROUNDING = 0.1, 1e-3  # relative, of figures that another machine changes; and absolute


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())} (default: all)")
    p.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = p.parse_args()
    wrong = []
    for name in arguments.names or names():
        shown = read(name)
        run = execute(shown)
        if arguments.check:
            wrong += [f"{name}: {line}" for line in differences(shown, run)]
        else:
            nbformat.write(run, FOLDER / f"{name}.ipynb")
    print("\n".join(wrong), end="")
    sys.exit(int(bool(wrong)))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_hash(book: nbformat.NotebookNode) -> str:
    """Identifies the code that a notebook's outputs belong to."""
    cells = [cell.source for cell in book.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(cells).encode()).hexdigest()[:16]


def execute(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run: what it prints and shows, without warnings and progress.

    Raises CellExecutionError where a cell raises.
    """
    book = nbformat.from_dict(book)
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        client = nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": folder}})
        client.execute(env=environment)
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [_plain(output) for output in cell.outputs if output.get("name") != "stderr"]
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "executed": code_hash(book),
    }
    return book


def _plain(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if "data" in output:
        output.data = {kind: value for kind, value in output.data.items() if kind in ("image/png", "text/plain")}
        output.metadata = {}
    return output


def differences(shown: nbformat.NotebookNode, run: nbformat.NotebookNode) -> list[str]:
    """What cells print now and show otherwise, one line each."""
    pairs = zip(map(_said, shown.cells), map(_said, run.cells), strict=True)
    return [f"shows {old!r}, prints {new!r}" for old, new in pairs if not _alike(old, new)]


def _said(cell: nbformat.NotebookNode) -> str:
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        parts.append("<picture>" if "image/png" in data else output.get("text") or data.get("text/plain", ""))
    return "".join(parts)


def _alike(old: str, new: str) -> bool:
    before, after = ([float(word.replace(",", "")) for word in NUMBER.findall(text)] for text in (old, new))
    return NUMBER.sub("#", old).split() == NUMBER.sub("#", new).split() and all(
        abs(a - b) <= max(ROUNDING, TOLERANCE * max(abs(a), abs(b))) for a, b in zip(before, after, strict=True)
    )


if __name__ == "__main__":
    main()
