"""Compute the metrics of a checkpoint: `python -m jaxtrain.evaluate --run runs/digits`."""

import argparse
import pathlib
from typing import Any

from jaxtrain import commands, strict_json
from jaxtrain.errors import UserError
from torch_bridge.atomic_file import write_text


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "evaluate",
        "Evaluate a checkpoint on a whole split: of a run, or a file with the config that it was trained with.",
        "python -m jaxtrain.evaluate --run runs/digits --checkpoint last",
    )
    commands.add_run(p, required=False)
    p.add_argument("--config", metavar="F", help="without --run: the config of the weights in --checkpoint FILE")
    p.add_argument(
        "--checkpoint", default="best", metavar="C", help="best, last or a step; with --config a file (default best)"
    )
    p.add_argument("--split", help="validation, test, train or all (default validation; with --config test)")
    p.add_argument("--output", type=commands.output_file, metavar="F.json", help="also write the metrics to this file")
    commands.add_json(p)
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the run's config.yaml")
    return commands.main(run, p.parse_intermixed_args(argv))


def run(arguments: argparse.Namespace) -> None:
    commands.quiet_jax()
    from jaxtrain import config_io
    from jaxtrain.runtime import plain_files
    from jaxtrain.train import run_dir
    from jaxtrain.train.checkpoint import init_from
    from jaxtrain.train.trainer import Trainer

    given = [one for one in arguments.overrides if one.startswith("checkpoint=")]
    overrides = [one for one in arguments.overrides if one not in given]
    which = given[-1].partition("=")[2] if given else arguments.checkpoint
    if (arguments.run is None) == (arguments.config is None):
        raise UserError("wanted --run DIR, or --config F with checkpoint=FILE (one of them)")
    split = arguments.split or ("validation" if arguments.config is None else "test")
    if arguments.config is not None:
        task, config = config_io.load(arguments.config, overrides)
        config = config.model_copy(update={"init_from": None})  # the file brings the weights
        trainer, folder, step = Trainer(config=config, task=task), config.run.folder, which
        if which == "best":
            raise UserError("--config: wanted checkpoint=FILE, the weights to evaluate")
        init_from.apply(trainer.program, which, weights_only=True)
    elif run_dir.made_in_python(arguments.run):
        _report(arguments, _recorded(arguments, which, split))
        return
    else:
        folder = pathlib.Path(arguments.run)
        _, _, checkpoints = run_dir.open_run(folder)
        step = run_dir.pick(checkpoints, which)
        task, config = config_io.load(folder / "config.yaml", overrides)
        trainer = Trainer(config=config, task=task, abstract=True)  # the checkpoint brings all weights
        trainer.state = checkpoints.restore(step, trainer.state, optimizer=False)
    if trainer.source(split) is None:
        raise UserError(f"--split {split}: there is no such split")
    metrics = trainer.evaluate(split)
    result = {"run": str(folder), "checkpoint": step, "split": split, "metrics": metrics}
    if task.report is not None:
        plain_files.refuse_links(folder)
        source = trainer.source(split)
        result["files"] = [
            str(path) for path in task.report(trainer.model(), source, trainer.config, folder / "reports")
        ]
    _report(arguments, result)


def _recorded(arguments: argparse.Namespace, which: str, split: str) -> dict[str, Any]:
    """Return the metrics that a run made in Python recorded with a checkpoint; no command can compute others."""
    from jaxtrain.train import run_dir
    from jaxtrain.train.checkpoint import best

    checkpoints = run_dir.open_checkpoints(arguments.run)
    saved = best.find(checkpoints, which)
    if split != "validation" or not saved.metrics or arguments.overrides:
        run_dir.open_run(arguments.run)  # raises: it says what the script can do
    result = {"run": str(arguments.run), "checkpoint": saved.step, "split": split, "metrics": saved.metrics}
    return result | {"note": "recorded when the run evaluated this checkpoint; its model was made in Python"}


def _report(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    arguments.found = result
    if not arguments.json:
        print(strict_json.dumps(result, indent=1))
    if arguments.output:
        write_text(arguments.output, strict_json.dumps(result, indent=1))


if __name__ == "__main__":
    commands.start(main)
