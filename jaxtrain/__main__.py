"""`jaxtrain COMMAND ...`: the commands of `python -m jaxtrain.COMMAND` under one name."""

import argparse
import importlib
import importlib.metadata
import os
import sys

from jaxtrain import commands
from jaxtrain.runtime.preemption import PREEMPTION

COMMANDS = {
    "run": "train the task of a YAML config",
    "evaluate": "compute the metrics of a checkpoint on a split",
    "export": "write the weights as a torch state dict",
    "report": "write an HTML report of one or more runs",
    "checkpoints": "list, verify or prune a run's checkpoints",
    "debug": "replay a step and name the first module whose result is not finite",
    "tune": "search hyper-parameters",
    "lr_find": "run a learning-rate range test",
    "plan": "predict memory and communication on GPUs you don't have",
    "verify": "compare the export in torch with JAX, layer by layer",
    "generate": "continue a prompt with a trained language model",
    "torchrun": "torchrun with the exit code of its processes",
    "completion": "print a script that completes commands and options in your shell",
    "doctor": "report devices, precision support and versions",
}
ELSEWHERE = {"verify": "torch_bridge.verify", "torchrun": "torch_bridge.torchrun"}


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
