"""Suggest a learning rate: `python -m jaxtrain.lr_find --config configs/digits.yaml`."""

import argparse
import importlib.util
import json
import pathlib

from jaxtrain import commands
from jaxtrain.errors import UserError, install
from torch_bridge.atomic_file import replacing, write_text


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "lr_find",
        "Raise the learning rate step by step, watch the loss, suggest a value. Trains nothing.",
        "python -m jaxtrain.lr_find --config configs/digits.yaml",
    )
    p.add_argument("--config", required=True, metavar="F", help="YAML config, such as configs/digits.yaml")
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the file")
    p.add_argument("--min-lr", type=float, default=1e-7, help="learning rate of the first step (default 1e-7)")
    p.add_argument("--max-lr", type=float, default=1.0, help="learning rate of the last step (default 1)")
    p.add_argument("--steps", type=commands.count(1, 10_000_000), default=100, help="optimizer steps (default 100)")
    p.add_argument("--no-clip", action="store_true", help="ignore optim.clip_norm")
    p.add_argument(
        "--output",
        type=commands.output_folder,
        metavar="DIR",
        help="folder for lr_find.json and lr_find.png (default: the run folder)",
    )
    p.add_argument("--no-plot", action="store_true", help="write no plot (needs no matplotlib)")
    commands.add_quiet(p)
    commands.add_json(p)
    return commands.main(run, p.parse_intermixed_args(argv))


def run(arguments: argparse.Namespace) -> None:
    if not arguments.no_plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"the picture needs matplotlib: {install('tune')}, or give --no-plot")
    from jaxtrain import config_io

    task, config = config_io.load(arguments.config, arguments.overrides)
    commands.quiet_jax()
    from jaxtrain.train.search.lr_range import range_test
    from jaxtrain.train.trainer import Trainer

    trainer = Trainer(config=config, task=task)
    folder = pathlib.Path(arguments.output) if arguments.output else trainer.folder
    found = range_test(trainer.program, arguments.min_lr, arguments.max_lr, arguments.steps, not arguments.no_clip)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "lr_find.json", json.dumps(found.document(), indent=1))
    written = [folder / "lr_find.json"]
    if not arguments.no_plot:
        written.append(folder / "lr_find.png")
        plot(found, written[-1])
    print(f"{len(found.lr)} steps from {found.lr[0]:.1e} to {found.lr[-1]:.1e} ({found.stopped})")
    print(f"steepest descent at {found.steepest:.1e}: optim.lr={found.steepest:.1e}")
    print(f"a tenth of the minimum: optim.lr={found.minimum_tenth:.1e}")
    print(f"written {' and '.join(map(str, written))}")
    arguments.found = {**found.document()["suggestion"], "stopped": found.stopped, "steps": len(found.lr)}
    arguments.found["files"] = [str(path) for path in written]


def plot(found, path: pathlib.Path) -> None:
    """Plot the loss over the learning rate, with both suggestions."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(found.lr, found.loss, color="0.8", label="loss")
    axes.plot(found.lr, found.smoothed, label="smoothed")
    for rate, name, style in ((found.steepest, "steepest", "--"), (found.minimum_tenth, "minimum / 10", ":")):
        axes.axvline(rate, color="black", linestyle=style, label=f"{name}: {rate:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss before the update")
    axes.set_ylim(top=min(max(found.loss), 2 * found.loss[0]))
    axes.legend()
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120, format="png")


if __name__ == "__main__":
    commands.start(main)
