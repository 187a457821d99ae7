"""Write docs/gallery.md, every shipped example with its command: `python docs/generate_gallery.py`.

The text comes from the examples: a script's docstring, a notebook's first cell, the head of a config or of a template.
A tutorial's thumbnail is its last picture, or what it prints.
"""

import ast
import base64
import html
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/gallery.md"
THUMBNAILS = ROOT / "docs/thumbnails"
TUTORIALS = (  # in the order to read them
    "quick_start",
    "one_import",
    "own_loop",
    "lora",
    "several_gpus",
    "data_at_scale",
    "verify",
    "plan",
    "forces",
    "free_notebooks",
)
SCRIPTS = (
    "training_example.py",
    "sweep.py",
    "own_model/train.py",
    "own_model/server.py",
    "continuation/digits_ddp.py",
)
LIBRARIES = ("lightning", "transformers", "accelerate")
HEAD = """# Examples

Every example that comes with jaxtrain. Tutorials and scripts run on a CPU and download nothing; the head of a config
says what it needs.

## Tutorials, with their outputs
"""


def page() -> str:
    cards = "\n\n".join(map(_card, TUTORIALS))
    parts = [HEAD, f'<div class="cards" markdown>\n\n{cards}\n\n</div>\n', "## Scripts\n"]
    parts += [_table("script", "what it shows", (_script(f"examples/{name}") for name in SCRIPTS))]
    parts.append("## Scripts with one changed import\n")
    parts.append("`--engine jaxtrain` runs a script here, the library's name there ([what is equal](drop_in.md)).\n")
    for library in LIBRARIES:
        rows = (_script(str(path.relative_to(ROOT))) for path in sorted(ROOT.glob(f"examples/drop_in/{library}_*.py")))
        parts += [f"### {library}\n", _table("script", "what it shows", rows)]
    parts += [
        "## Configs\n",
        "`python -m jaxtrain.run --config FILE` runs one; its head has cost and expected result.\n",
    ]
    parts.append(_table("config", "what it trains", map(_config, sorted(ROOT.glob("configs/*.yaml")))))
    parts += [
        "## Templates for clusters\n",
        _table("file", "for", map(_template, sorted(ROOT.glob("examples/launch/*")))),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _table(first: str, second: str, rows) -> str:
    lines = "\n".join(f"| {left} | {right} |" for left, right in rows)
    return f"| {first} | {second} |\n|---|---|\n{lines}\n"


def _card(name: str) -> str:
    """The tutorial's picture, title and first sentence, one link."""
    title, *rest = "".join(_cells(name)[0]["source"]).split("\n")
    picture = f"thumbnails/{thumbnail(name)[0]}"
    return f"[![]({picture}) **{title.removeprefix('# ')}** {_sentence(' '.join(rest))}](tutorials/{name}.ipynb)"


def _cells(name: str) -> list[dict]:
    return json.loads((ROOT / f"docs/tutorials/{name}.ipynb").read_text())["cells"]


def thumbnail(name: str) -> tuple[str, bytes]:
    """A file's name and content: the tutorial's first picture, or a drawing of what it prints."""
    outputs = [output for cell in _cells(name) for output in cell.get("outputs", [])]
    for output in outputs:
        if png := output.get("data", {}).get("image/png"):
            return f"{name}.png", base64.b64decode("".join(png))
    printed = "".join("".join(output.get("text", "")) for output in outputs).splitlines()
    lines = "".join(
        f'<text x="16" y="{34 + 22 * row}" xml:space="preserve">{html.escape(line[:44])}</text>\n'
        for row, line in enumerate(printed[:8])
    )
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 384 216">\n'
        '<rect width="384" height="216" fill="#1c2430"/>\n'
        f'<g font-family="monospace" font-size="13" fill="#e6e9ef">\n{lines}</g>\n</svg>\n'
    )
    return f"{name}.svg", drawing.encode()


def _script(name: str) -> tuple[str, str]:
    """The script's command, and the first sentence of its docstring or first cell."""
    text = (ROOT / name).read_text()
    said = ast.get_docstring(ast.parse(text)) or _cell(text)
    command = re.search(rf"(?:torchrun [^\n`]*|python ){re.escape(name)}[^\n`|]*(?:\|jaxtrain)?", said)
    if command is None:
        raise SystemExit(f"{name}: its docstring has no command")
    shown = re.sub(r"--engine \w+\|jaxtrain", "--engine jaxtrain", command.group().split("  ")[0].strip().rstrip("."))
    return f"`{shown}`", _sentence(said.split(command.group())[0].strip(" `\n:"))


def _cell(text: str) -> str:
    """The first cell of a notebook in a script: its command, then its title."""
    title = re.search(r"^# # (.*)", text, re.M)
    command = re.search(r"`(python [^`]*)`", text)
    return f"{title.group(1)}\n{command.group(1)}" if title and command else ""


def _config(path: pathlib.Path) -> tuple[str, str]:
    return f"`{path.relative_to(ROOT)}`", _sentence(_comment(path.read_text()))


def _template(path: pathlib.Path) -> tuple[str, str]:
    return f"`{path.relative_to(ROOT)}`", _sentence(_comment(path.read_text()))


def _comment(text: str) -> str:
    """The first comment of a file that describes it: no directive of a shell, of Slurm or of an editor."""
    lines = []
    for line in text.splitlines():
        if re.match(r"#!|#SBATCH|# yaml-language-server|# %% \[|# #|#$", line):
            continue
        if not line.startswith("#"):
            if lines:
                break
            continue
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def _sentence(text: str) -> str:
    """The first sentence, for a cell of a table."""
    first = re.split(r"(?<=[a-z0-9)`])[.:;](?: |$)", " ".join(text.split()), maxsplit=1)[0]
    return first.strip().rstrip(".:").replace("|", "\\|")


if __name__ == "__main__":
    files = {PAGE: page().encode()} | {THUMBNAILS / name: content for name, content in map(thumbnail, TUTORIALS)}
    if "--check" in sys.argv:
        known = {path: path.read_bytes() for path in (PAGE, *THUMBNAILS.glob("*"))}
        sys.exit(known != files)
    for path in set(THUMBNAILS.glob("*")) - set(files):
        path.unlink()
    THUMBNAILS.mkdir(exist_ok=True)
    for path, content in files.items():
        path.write_bytes(content)
