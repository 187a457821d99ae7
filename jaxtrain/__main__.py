"""`jaxtrain COMMAND ...`: the commands of `python -m jaxtrain.COMMAND` under one name."""

import argparse
import importlib
import importlib.metadata
import sys

from jaxtrain import commands
from jaxtrain.runtime.preemption import PREEMPTION

COMMANDS = {
    "run": "train what a YAML file describes",
    "evaluate": "metrics of a checkpoint on a whole split",
    "export": "the weights as a torch state dict",
    "report": "a page about one run or several",
    "checkpoints": "list, verify or prune a run's checkpoints",
    "tune": "search hyper-parameters",
    "lr_find": "learning-rate range test",
    "plan": "memory and collectives on GPUs that are not here",
    "verify": "the export in the torch twin, layer by layer",
    "generate": "continue a prompt with a trained language model",
    "torchrun": "torchrun with the exit code of its processes",
    "doctor": "what this machine offers",
}
ELSEWHERE = {"verify": "torch_bridge.verify", "torchrun": "torch_bridge.torchrun"}


def main(argv: list[str] | None = None) -> int:
    if argv is None:  # the process is this command's
        PREEMPTION.listen(command=True)
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        lines = "".join(f"  {command:12} {about}\n" for command, about in COMMANDS.items())
        print(f"usage: jaxtrain COMMAND ...\n\n{lines}\n`jaxtrain COMMAND --help` says more, with an example.")
        return 0
    if name == "--version":
        print(f"jaxtrain {importlib.metadata.version('jaxtrain')}")
        return 0
    if name not in COMMANDS:
        print(f"error: {name}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = ELSEWHERE.get(name, f"jaxtrain.{name}")
    return commands.main(lambda _: importlib.import_module(module).main(rest), argparse.Namespace())


if __name__ == "__main__":
    commands.start(main)
