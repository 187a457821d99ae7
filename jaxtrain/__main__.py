"""`jaxtrain COMMAND ...`: the commands of `python -m jaxtrain.COMMAND` under one name."""

import argparse
import importlib
import importlib.metadata
import os
import sys

from jaxtrain import commands
from jaxtrain.commands import COMMANDS, ELSEWHERE
from jaxtrain.runtime.preemption import PREEMPTION


def main(argv: list[str] | None = None) -> int:
    if argv is None:  # run as a process of its own
        PREEMPTION.listen(command=True)
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` has it: a config may name the user's modules there
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        lines = "".join(f"  {command:12} {about}\n" for command, about in COMMANDS.items())
        print(f"usage: jaxtrain COMMAND ...\n\n{lines}\n`jaxtrain COMMAND --help` lists its options, with an example.")
        return 0
    if name == "--version":
        print(f"jaxtrain {importlib.metadata.version('jaxtrain')}")
        return 0
    if name not in COMMANDS:
        print(f"error: {name}: no such command; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = ELSEWHERE.get(name, f"jaxtrain.{name}")
    return commands.main(lambda _: importlib.import_module(module).main(rest), argparse.Namespace())


if __name__ == "__main__":
    commands.start(main)
