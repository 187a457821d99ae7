"""Export a run to torch: `python -m jaxtrain.export --run runs/digits --output digits.pt [--optimizer]`."""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtrain import commands
from jaxtrain.errors import UserError
from jaxtrain.task import Task
from torch_bridge.atomic_file import write_text


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "export",
        "Write a checkpoint for torch: its weights, or all that a torch training loop needs to go on.",
        "python -m jaxtrain.export --run runs/digits --output digits.pt",
    )
    commands.add_run(p)
    p.add_argument("--checkpoint", help="best, last or a step (default best; last with --optimizer)")
    p.add_argument("--output", metavar="F", help="a .pt or .safetensors file")
    p.add_argument("--optimizer", action="store_true", help="add optimizer, schedule and data position (.pt only)")
    p.add_argument(
        "--averaged",
        action=argparse.BooleanOptionalAction,
        help="with optim.ema_decay: the averaged or the raw weights (default evaluation.averaged)",
    )
    p.add_argument(
        "--hf", type=commands.output_folder, metavar="DIR", help="also write a folder for transformers' from_pretrained"
    )
    p.add_argument(
        "--format",
        "--as",
        dest="form",
        nargs=2,
        metavar=("FORM", "DIR"),
        help="also write a folder in one of the task's formats, such as peft",
    )
    commands.add_quiet(p)
    commands.add_json(p)
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> None:
    commands.quiet_jax()
    folder, output, hf = pathlib.Path(arguments.run), arguments.output, arguments.hf
    if output is None and hf is None and arguments.form is None:
        raise UserError("nothing to write: give --output F.pt, --output F.safetensors, --hf DIR or --format FORM DIR")
    if arguments.optimizer and output is None:
        raise UserError("--optimizer goes into a file: add --output F.pt")
    written = []
    if output is not None:
        if arguments.optimizer:
            path = export_training_state(folder, pathlib.Path(output), arguments.checkpoint)
        else:
            path = export_weights(folder, pathlib.Path(output), arguments.checkpoint, arguments.averaged)
        written.append(path)
    if hf is not None:
        written.append(export_hf(folder, pathlib.Path(hf), arguments.checkpoint, arguments.averaged))
    if arguments.form is not None:
        form, place = arguments.form
        written.append(export_as(folder, form, pathlib.Path(place), arguments.checkpoint, arguments.averaged))
    for path in written:
        print(f"exported {path}")
    arguments.found = {"run": str(folder), "exported": [str(path) for path in written]}


def export_weights(
    folder: pathlib.Path, output: pathlib.Path, checkpoint: str | None = None, averaged: bool | None = None
) -> pathlib.Path:
    """Write the weights of `checkpoint`. Default: "best" if an evaluated one exists, else "last"."""
    from torch_bridge import files

    return files.save(_weights(folder, checkpoint, averaged).state, output)


def export_training_state(folder: pathlib.Path, output: pathlib.Path, checkpoint: str | None = None) -> pathlib.Path:
    """Write the training state of `checkpoint` (default "last"), from which a plain torch loop can resume."""
    from jaxtrain.train.checkpoint import torch_checkpoint
    from torch_bridge import files

    if output.suffix not in files.PICKLES:
        raise UserError(f"--output {output}: a training state is a tree of dicts, which only a .pt holds")
    return files.save(torch_checkpoint.of_run(folder, checkpoint or "last"), output)


def export_hf(
    run: pathlib.Path, output: pathlib.Path, checkpoint: str | None = None, averaged: bool | None = None
) -> pathlib.Path:
    """Write the model as a Hugging Face folder. Raises UserError if its task has no Hugging Face form."""
    from torch_bridge import files

    task, config, state, _ = _weights(run, checkpoint, averaged)
    if task.twin is None or task.twin.hf is None:
        raise UserError(f"--hf: {_models_of(config)} no Hugging Face form; {_instead(config, 'save_pretrained(DIR)')}")
    described, renamed = task.twin.hf(config, state)
    folder = files.save_folder(renamed, described, output)
    for name, text in (task.twin.hf_files(config) if task.twin.hf_files is not None else {}).items():
        write_text(folder / name, text)
    return folder


def export_as(
    run: pathlib.Path, form: str, output: pathlib.Path, checkpoint: str | None = None, averaged: bool | None = None
) -> pathlib.Path:
    """Write a folder in the format `form`, one of the task's own (TorchTwin.folders). Raises UserError for another."""
    task, config, state, meta = _weights(run, checkpoint, averaged)
    forms = task.twin.folders if task.twin is not None else {}
    if form not in forms:
        if not forms:
            raise UserError(f"--format {form}: {_models_of(config)} no such form; {_instead(config, LORA)}")
        raise UserError(f"--format {form}: unknown for {config.task}, wanted one of {', '.join(forms)}")
    return forms[form](config, state, output, meta)


LORA = "torch_bridge.training.lora.save(model, DIR)"


def _models_of(config: Any) -> str:
    return (
        f"the models of {config.task} have" if config.task else "no command can build a model made in Python, so it has"
    )


def _instead(config: Any, call: str) -> str:
    """Say what to do instead. call: of the script, for a model that was made in Python."""
    script = f"; in the script, trainer.load_best() and then {call}" if config.task is None else ""
    return f"take --output F.safetensors{script}"


class _Weights(NamedTuple):
    """Weights of a checkpoint. state: arrays in checkpoint.save_precision. meta: the checkpoint's facts on its run."""

    task: Task
    config: Any
    state: Mapping[str, Any]
    meta: Mapping[str, Any]


def _weights(folder: pathlib.Path, checkpoint: str | None, averaged: bool | None = None) -> _Weights:
    """Return the weights of a checkpoint with its task, config and metadata."""
    from jaxtrain.train import run_dir
    from jaxtrain.train.checkpoint import recorded_model
    from torch_bridge import files
    from torch_bridge.state_dict import open_state_dict

    checkpoints = run_dir.open_weights(folder)[2]
    if checkpoint is None:
        checkpoint = "best" if checkpoints.best() is not None else "last"
    task, config, model, step = run_dir.load_model(folder, checkpoint, averaged)
    state = files.cast(open_state_dict(model), config.checkpoint.save_precision)
    state = recorded_model.completed(model, state)
    return _Weights(task, config, state, checkpoints.meta(step))


if __name__ == "__main__":
    commands.start(main)
