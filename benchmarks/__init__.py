"""Figures: each module is a command that measures one thing and says how."""

import argparse
import json
import pathlib
from typing import Any

from jaxtrain import commands

commands.quiet_jax()


def parser(description: str) -> argparse.ArgumentParser:
    """With `--json F`, which every benchmark takes. description: a docstring, of which the first line shows."""
    p = argparse.ArgumentParser(description=description.splitlines()[0])
    p.add_argument("--json", metavar="F", type=pathlib.Path, help="write the figures there too")
    return p


def save(found: Any, path: pathlib.Path | None) -> None:
    """The figures as JSON, where a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
