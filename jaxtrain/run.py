"""Train: `python -m jaxtrain.run --config configs/digits.yaml [section.key=value ...]`."""

import argparse
import contextlib
import importlib.util
import json
import pathlib
import sys
import traceback
from typing import NoReturn

from jaxtrain import commands, flags, redaction
from jaxtrain.errors import UserError
from jaxtrain.runtime import terminal
from jaxtrain.runtime.preemption import PREEMPTION, Preempted

OPTIONS = ("--help", "--config", "--resume", "--dry-run", "--print-config", "--profile", "--quiet")


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "run", "Train the task of a YAML config.", "python -m jaxtrain.run --config configs/digits.yaml optim.lr=1e-3"
    )
    p.add_argument(
        "--config",
        required=True,
        metavar="F",
        help="YAML config, such as configs/digits.yaml, or one of an original torch project",
    )
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the file")
    p.add_argument(
        "--resume",
        default="auto",
        help="auto (resume in the run folder), never, another run's folder, or a torch training checkpoint",
    )
    p.add_argument("--dry-run", action="store_true", help="build everything, print a summary, run no step")
    p.add_argument("--print-config", action="store_true", help="print the config with all defaults and exit")
    p.add_argument(
        "--profile",
        action="store_true",
        help="trace three steps and print where their time went (profile.start, .steps)",
    )
    commands.add_quiet(p)

    def parse_and_run(_: argparse.Namespace) -> int:
        own, given = flags.split(sys.argv[1:] if argv is None else argv, OPTIONS)
        if {"-h", "--help"} & {*own}:
            named = [after for word, after in zip(own, own[1:], strict=False) if word == "--config"]
            p.epilog = f"{p.epilog}\n\n{flags.help_text(named[0] if named else None)}"
        arguments = p.parse_intermixed_args(own)
        arguments.flags = given
        if arguments.quiet:
            arguments.overrides.append("run.quiet=true")
        with terminal.outliving_its_reader():
            return commands.main(together(run), arguments)

    return commands.main(parse_and_run, argparse.Namespace())  # reports mistakes in flags or --help's config


def together(command):
    """Wrap a command so that, as one of several processes, it exits on any error without waiting for the others."""

    def guarded(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except Preempted:
            raise  # all processes leave together
        except BaseException as error:
            import jax

            if not jax.distributed.is_initialized():
                raise
            if isinstance(error, UserError):
                print(f"error: {redaction.mask(str(error))}", file=sys.stderr, flush=True)
                leave(error.exit_code)
            traceback.print_exc()
            sys.stderr.flush()
            leave(commands.FAILED)

    return guarded


def leave(code: int) -> NoReturn:
    """Exit now: at a normal exit JAX would wait for a lost process. Process 0 exits last, because its exit ends the
    others."""
    from jaxtrain.runtime import launch, leaving

    launch.say_goodbye()
    leaving.leave(code)


def run(arguments: argparse.Namespace) -> int:
    from jaxtrain import config_io

    arguments.overrides += flags.overrides(arguments.flags, arguments.config, arguments.overrides)
    task, config = config_io.load(arguments.config, arguments.overrides)
    if _is_file(arguments.resume):
        if not _newest_of(config, pathlib.Path(arguments.resume).expanduser()):
            config = config_io.validate(type(config), dict(config) | {"init_from": arguments.resume}, "--resume")
        arguments.resume = "auto"
    if arguments.profile and not config.profile.steps:
        profile = config.profile.model_copy(update={"steps": 3})
        config = config.model_copy(update={"profile": profile})
    translation = config_io.translated(arguments.config, arguments.overrides)
    explanation = "" if translation is None else "\n".join(translation.lines()) + "\n"
    if arguments.print_config:
        print(explanation + config_io.dump(config), end="")
        return 0
    with contextlib.nullcontext() if arguments.dry_run else PREEMPTION.listening():
        return start(task, config, explanation, arguments)


def _is_file(resume: str) -> bool:
    """Return True if --resume names a torch checkpoint; it is then used as init_from, with the optimizer's state."""
    return resume not in ("auto", "never") and pathlib.Path(resume).expanduser().is_file()


def _newest_of(config, file: pathlib.Path) -> bool:
    """Return True if a torch checkpoint in the run's own folder holds the run's newest step, so resuming suffices."""
    from jaxtrain.train import run_dir

    folder = config.run.folder
    step = run_dir.checkpoints(folder, config).latest()
    if step is None or not run_dir.same(folder, file.parent):
        return False
    from torch_bridge.files import checkpoint

    return checkpoint.open_checkpoint(file).step == step


def start(task, config, explanation: str, arguments: argparse.Namespace) -> int:
    """Connect to the other processes, train, export."""
    from jaxtrain import config_io

    commands.quiet_jax()
    from jaxtrain.runtime import cpu_threads, launch

    started = launch.setup_distributed()
    with cpu_threads.limited(config.shard.threads):
        launch.preflight(config_io.dump(config))
    if started.process == 0:
        print(explanation, end="")
    if started.processes > 1 and started.process == 0:
        print(started)
    from jaxtrain.train.trainer import Trainer

    if arguments.dry_run and task.describe is not None:
        print(task.describe(config), flush=True)  # needs no data
    trainer = Trainer(config=config, task=task)
    if arguments.dry_run:
        from jaxtrain.train.checkpoint import init_from

        if config.init_from is not None and trainer.checkpoints().latest() is None:
            init_from.locate(config.init_from)
        print(trainer.describe())
        return 0
    trainer.train(resume=arguments.resume)
    return 0 if trainer.config.train.fast_dev_run else finish(trainer)


def finish(trainer) -> int:
    """Tell of the exported weights, register them in MLflow, and compare them with the torch twin."""
    import jax

    from jaxtrain.runtime import launch

    tested = test_metrics(trainer) if trainer.config.evaluation.test else {}
    if jax.process_index() != 0:
        launch.wait_for_all("end of the run")
        return 0
    path = trainer.exported
    if path is None:  # checkpoint.export=false, or a warning has told what failed
        launch.wait_for_all("end of the run")
        if not trainer.config.checkpoint.export:
            return 0
        why = trainer.export_failure.removesuffix(".")
        again = f"jaxtrain export --run {trainer.folder}"
        print(f"error: {why}. The run is complete; its best weights are written by: {again}", file=sys.stderr)
        return commands.FAILED
    print(f"exported {path}")
    if trainer.config.tracking.mlflow:
        from jaxtrain.train.tracking import mlflow

        try:
            version = mlflow.finish(trainer.folder, trainer.config.tracking, path, tested)
        except mlflow.StoreError as error:
            print(f"error: {redaction.mask(str(error))}. The run is complete, with its weights", file=sys.stderr)
            launch.wait_for_all("end of the run")
            return commands.FAILED
        if version is not None:
            print(f"registered in MLflow: {trainer.config.tracking.mlflow_model}, version {version}")
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch and trainer.task.twin is not None and trainer.source("validation") is not None:
        from torch_bridge.verification import compare_with_twin

        print(compare_with_twin(trainer.folder, path, trainer.source("validation")))
    launch.wait_for_all("end of the run")
    return 0


def test_metrics(trainer) -> dict[str, float]:
    """Evaluate the best checkpoint on the test split; print the metrics and add them to summary.json. Return {} if
    there is no such split."""
    import jax

    from jaxtrain import strict_json
    from jaxtrain.train import run_dir

    if trainer.source("test") is None:
        print("evaluation.test: there is no test split")
        return {}
    checkpoints = trainer.checkpoints()
    which = "best" if checkpoints.best() is not None else "last"
    trainer.state = checkpoints.restore(run_dir.pick(checkpoints, which), trainer.state)
    found = trainer.evaluate("test")  # by all processes together
    if jax.process_index() != 0:
        return found
    print("test " + "  ".join(f"{name} {value:.4f}" for name, value in found.items()))
    summary = json.loads((trainer.folder / "summary.json").read_text(encoding="utf-8"))
    run_dir.write(trainer.folder, "summary.json", strict_json.dumps(summary | {"test": found}, indent=1))
    return found


if __name__ == "__main__":
    commands.start(main)
