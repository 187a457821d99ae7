"""Figures: each module is a command that measures one thing and says how."""

import argparse
import json
import pathlib
import re
from typing import Any

from jaxtrain import commands

commands.quiet_jax()


def parser(description: str, figures: bool = True) -> argparse.ArgumentParser:
    """description: a docstring; its first line is shown, its first command is the example. figures: with `--json F`."""
    command = re.search(r"python -m (benchmarks\.\w+)[^`\n]*", description)
    p = argparse.ArgumentParser(
        prog=f"python -m {command.group(1)}",
        description=re.split(r": `|\n", description)[0].rstrip(".") + ".",
        epilog=f"example:\n  {command.group()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if figures:
        p.add_argument("--json", metavar="F", type=pathlib.Path, help="write the figures there too")
    return p


def save(found: Any, path: pathlib.Path | None) -> None:
    """The figures as JSON, where a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
