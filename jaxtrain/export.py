"""A run for torch: `python -m jaxtrain.export --run runs/digits --output digits.pt [--optimizer]`."""

import argparse
import pathlib
import sys

from jaxtrain import commands
from jaxtrain.errors import UserError


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "export",
        "Write a checkpoint for torch: its weights, or all that a torch training loop needs to go on.",
        "python -m jaxtrain.export --run runs/digits --output digits.pt",
    )
    commands.add_run(p)
    p.add_argument("--checkpoint", help="best, last or a step (default best; last with --optimizer)")
    p.add_argument("--output", metavar="F", help="a .pt or .safetensors file")
    p.add_argument("--optimizer", action="store_true", help="add optimizer, schedule and position (a .pt)")
    p.add_argument(
        "--averaged",
        action=argparse.BooleanOptionalAction,
        help="with optim.ema_decay: the averaged weights, or those that train (default evaluation.averaged)",
    )
    p.add_argument("--hf", metavar="DIR", help="a folder that transformers' from_pretrained reads")
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> None:
    commands.quiet_jax()
    folder, output, hf = pathlib.Path(arguments.run), arguments.output, arguments.hf
    if output is None and hf is None:
        raise UserError("nothing to write: give --output F.pt, --output F.safetensors or --hf DIR")
    if arguments.optimizer and output is None:
        raise UserError("--optimizer goes into a file: add --output F.pt")
    if output is not None:
        if arguments.optimizer:
            path = export_training_state(folder, pathlib.Path(output), arguments.checkpoint)
        else:
            path = export_weights(folder, pathlib.Path(output), arguments.checkpoint, arguments.averaged)
        print(f"exported {path}")
    if hf is not None:
        print(f"exported {export_hf(folder, pathlib.Path(hf), arguments.checkpoint, arguments.averaged)}")


def export_weights(
    folder: pathlib.Path, output: pathlib.Path, checkpoint: str | None = None, averaged: bool | None = None
) -> pathlib.Path:
    """Write the weights of `checkpoint` ("best" where one was evaluated, else "last", if left out)."""
    from torch_bridge import files

    return files.save(_weights(folder, checkpoint, averaged)[2], output)


def export_training_state(folder: pathlib.Path, output: pathlib.Path, checkpoint: str | None = None) -> pathlib.Path:
    """Write the training state of `checkpoint` ("last" if left out), from which a plain torch loop goes on."""
    from jaxtrain.train import training_file
    from torch_bridge import files

    if output.suffix not in files.PICKLES:
        raise UserError(f"--output {output}: a training state is a tree of dicts, which only a .pt holds")
    return files.save(training_file.of_run(folder, checkpoint or "last"), output)


def export_hf(
    run: pathlib.Path, output: pathlib.Path, checkpoint: str | None = None, averaged: bool | None = None
) -> pathlib.Path:
    """Write the model as a Hugging Face folder, where its task has that form."""
    from torch_bridge import files

    task, config, state = _weights(run, checkpoint, averaged)
    if task.twin is None or task.twin.hf is None:
        raise UserError(f"--hf: the models of {config.task} have no Hugging Face form; take --output F.safetensors")
    described, renamed = task.twin.hf(config, state)
    folder = files.save_folder(renamed, described, output)
    for name, text in (task.twin.hf_files(config) if task.twin.hf_files is not None else {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _weights(folder: pathlib.Path, checkpoint: str | None, averaged: bool | None = None):
    """Task, config, and the weights of a checkpoint as Leaves in checkpoint.save_precision."""
    from jaxtrain.train import runs
    from torch_bridge import files
    from torch_bridge.state_dict import open_state_dict

    if checkpoint is None:
        checkpoint = "best" if runs.open_run(folder)[2].best() is not None else "last"
    task, config, model, _ = runs.load_model(folder, checkpoint, averaged)
    return task, config, files.cast(open_state_dict(model), config.checkpoint.save_precision)


if __name__ == "__main__":
    sys.exit(main())
