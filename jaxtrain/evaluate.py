"""Compute the metrics of a checkpoint: `python -m jaxtrain.evaluate --run runs/digits`."""

import argparse
import pathlib

from jaxtrain import commands, strict_json


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "evaluate",
        "Evaluate a checkpoint on a whole split.",
        "python -m jaxtrain.evaluate --run runs/digits --checkpoint last",
    )
    commands.add_run(p)
    commands.add_checkpoint(p)
    p.add_argument("--split", default="validation", help="validation, test or train (default validation)")
    p.add_argument("--output", type=commands.output_file, metavar="F.json", help="also write the metrics to this file")
    commands.add_json(p)
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the run's config.yaml")
    return commands.main(run, p.parse_intermixed_args(argv))


def run(arguments: argparse.Namespace) -> None:
    commands.quiet_jax()
    from jaxtrain import config_io
    from jaxtrain.runtime import plain_files
    from jaxtrain.train import run_dir
    from jaxtrain.train.trainer import Trainer

    folder = pathlib.Path(arguments.run)
    _, _, checkpoints = run_dir.open_run(folder)
    step = run_dir.pick(checkpoints, arguments.checkpoint)
    task, config = config_io.load(folder / "config.yaml", arguments.overrides)
    trainer = Trainer(config=config, task=task, abstract=True)  # the checkpoint holds all that there is
    trainer.state = checkpoints.restore(step, trainer.state)
    metrics = trainer.evaluate(arguments.split)
    result = {"run": str(folder), "checkpoint": step, "split": arguments.split, "metrics": metrics}
    if task.report is not None:
        plain_files.refuse_links(folder)
        source = trainer.source(arguments.split)
        result["files"] = [
            str(path) for path in task.report(trainer.model(), source, trainer.config, folder / "reports")
        ]
    arguments.found = result
    if not arguments.json:
        print(strict_json.dumps(result, indent=1))
    if arguments.output:
        pathlib.Path(arguments.output).write_text(strict_json.dumps(result, indent=1))


if __name__ == "__main__":
    commands.start(main)
