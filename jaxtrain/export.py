"""Weights of a run as a torch state dict: `python -m jaxtrain.export --run runs/digits --output digits.pt`."""

import argparse
import pathlib
import sys

from jaxtrain import commands


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "export",
        "Write a checkpoint's weights for torch.",
        "python -m jaxtrain.export --run runs/digits --output digits.pt",
    )
    commands.add_run(p)
    commands.add_checkpoint(p)
    p.add_argument("--output", required=True, metavar="F", help="a .pt or .safetensors file")
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> None:
    commands.quiet_jax()
    print(
        f"exported {export_weights(pathlib.Path(arguments.run), pathlib.Path(arguments.output), arguments.checkpoint)}"
    )


def export_weights(folder: pathlib.Path, output: pathlib.Path, checkpoint: str | None = None) -> pathlib.Path:
    """Write the weights of `checkpoint` ("best" where one was evaluated, else "last", if left out)."""
    from jaxtrain.train import runs
    from torch_bridge import files
    from torch_bridge.state_dict import state_dict

    if checkpoint is None:
        checkpoint = "best" if runs.open_run(folder)[2].best() is not None else "last"
    _, config, model, _ = runs.load_model(folder, checkpoint)
    return files.save(files.cast(state_dict(model), config.checkpoint.save_precision), output)


if __name__ == "__main__":
    sys.exit(main())
