"""Search hyper-parameters: `python -m jaxtrain.tune --config F --space F`."""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import time

from jaxtrain import commands
from jaxtrain.errors import UserError, install


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "tune",
        "Try settings from a search space, and write the best ones as a config. Goes on in an existing study.",
        "python -m jaxtrain.tune --config configs/criteria_tiny.yaml --space configs/hpo/criteria_tiny.yaml",
    )
    p.add_argument("--config", required=True, metavar="F", help="YAML config, such as configs/digits.yaml")
    p.add_argument("--space", required=True, metavar="F", help="search space, such as configs/hpo/criteria_tiny.yaml")
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the config file")
    p.add_argument(
        "--trials", type=commands.count(), metavar="N", help="trials of the study (default: as the search space says)"
    )
    p.add_argument(
        "--workers", type=commands.count(1, 1024), default=1, metavar="N", help="parallel worker processes (default 1)"
    )
    p.add_argument(
        "--vmap",
        type=commands.count(1, 100_000),
        default=1,
        metavar="K",
        help="train K trials at once in one compiled program",
    )
    p.add_argument(
        "--output",
        type=commands.output_folder,
        metavar="DIR",
        help="the study's folder (default runs/tune/<name of the space>)",
    )
    p.add_argument("--storage", metavar="URL", help="the study's database (default: study.db in its folder)")
    p.add_argument("--no-plots", action="store_true", help="write no HTML pages")
    commands.add_quiet(p)
    commands.add_json(p)
    p.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = p.parse_intermixed_args(argv)
    arguments.given = sys.argv[1:] if argv is None else list(argv)
    return commands.main(run, arguments)


def run(arguments: argparse.Namespace) -> int:
    for name in ("trials", "workers", "vmap"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise UserError(f"--{name} {getattr(arguments, name)}: wanted 1 or more")
    missing = [name for name in ("optuna", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"a search needs {' and '.join(missing)}: {install('tune')}")
    commands.quiet_jax()
    from jaxtrain import config_io
    from jaxtrain.tuning import space
    from jaxtrain.tuning.study import database_faults

    source = pathlib.Path(arguments.config)
    values, varied = config_io.merged(source, arguments.overrides), space.load(arguments.space)
    space.check(varied, values, source)
    config = config_io.check(values, source)[1]
    folder = pathlib.Path(arguments.output or pathlib.Path("runs") / "tune" / pathlib.Path(arguments.space).stem)
    with database_faults(folder, arguments.storage):
        return search(arguments, folder, source, values, config, varied)


def search(arguments: argparse.Namespace, folder: pathlib.Path, source: pathlib.Path, values, config, varied) -> int:
    """Begin the study, or go on with it; return the exit code. varied: the search space."""
    from jaxtrain import config_io
    from jaxtrain.tuning import results
    from jaxtrain.tuning.study import Study

    study = Study(folder, varied, config.evaluation.mode, arguments.storage, arguments.worker or 0)
    fixed = config_io.flatten(config.model_dump(mode="json"))
    study.check_settings({key: value for key, value in fixed.items() if key not in varied.settings})
    wanted = arguments.trials or varied.study.trials
    if varied.study.sampler.name == "grid":
        wanted = min(wanted, len(study.optuna.trials))
    tracked: dict = {"tensorboard": False}
    if config.tracking.mlflow:
        from jaxtrain.tuning import mlflow

        tracked |= mlflow.begin(study, config)
    deadline = time.monotonic() + (varied.study.timeout_s or float("inf"))
    if arguments.workers > 1 and arguments.worker is None:
        supervise(study, arguments, wanted)
    else:
        work(study, arguments, wanted, deadline, values, tracked)
    study.close()
    if arguments.worker is not None:
        return 0
    if config.tracking.mlflow:
        mlflow.end(study, tracked)
    written = results.write(study, values, source, plots=not arguments.no_plots)
    arguments.found = outcome(study, config.evaluation.metric, written)
    return tell(study, arguments.found)


def work(study, arguments: argparse.Namespace, wanted: int, deadline: float, values: dict, tracked: dict) -> None:
    """Run trials, one at a time or several in one program, until enough have begun or the deadline has passed."""
    from jaxtrain.tuning import space
    from jaxtrain.tuning.trials import Trials

    trials = Trials(study, space.load(arguments.space), values, arguments.config, tracked)
    if arguments.vmap > 1:
        trials.check_population()
    while time.monotonic() < deadline and (taken := study.take(arguments.vmap, wanted)):
        if arguments.vmap > 1:
            trials.run_together(taken)
        else:
            trials.run(taken[0])
        for trial in taken:
            say(study, study.optuna.get_trials(deepcopy=False)[trial.number])
    print(f"training steps compiled: {trials.compilations}", flush=True)


def supervise(study, arguments: argparse.Namespace, wanted: int) -> None:
    """Run several worker processes; replace one that dies, so that its trial is tried again. Raises UserError if too
    many die."""
    command = [sys.executable, "-m", "jaxtrain.tune", *arguments.given, "--worker"]
    said = sys.stderr if arguments.json else None  # where workers print; --quiet is passed on to them
    start = lambda number: subprocess.Popen([*command, str(number)], stdout=said)
    running = {number: start(number) for number in range(1, min(arguments.workers, wanted) + 1)}
    started, died = len(running), 0
    try:
        while running:
            time.sleep(0.1)
            for number, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[number]
                if process.returncode:
                    died, started = died + 1, started + 1
                    print(f"worker {number} ended with {process.returncode}", flush=True)
                    if died > wanted + arguments.workers:
                        raise UserError(f"{died} workers died, see {study.folder}; what remains is not tried")
                    running[started] = start(started)
    finally:
        for process in running.values():
            process.terminate()


def say(study, trial) -> None:
    """Print one line about a trial that ended."""
    value = "" if trial.value is None else f" {trial.value:.6g}"
    error = study.error_of(trial)
    chosen = " ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
    why = f" ({error})" if error else ""
    print(f"trial {trial.number} {trial.state.name.lower()}{value}: {chosen}{why}", flush=True)


def outcome(study, metric: str, written: list[pathlib.Path]) -> dict:
    """Return the `--json` summary of a study; best: None if no trial has finished."""
    ended, best = study.ended(), study.best()
    found = {"study": str(study.folder), "metric": metric, "best": None}
    if best is not None:
        found["best"] = {"trial": best.number, "value": best.value, "params": best.params}
    states = [trial.state.name for trial in ended]
    found["trials"] = {name.lower(): states.count(name) for name in ("COMPLETE", "PRUNED", "FAIL")}
    return {**found, "files": [str(path) for path in written]}


def tell(study, found: dict) -> int:
    """Print the outcome; return the exit code, 1 if no trial has finished."""
    print(", ".join(f"{count} {state}" for state, count in found["trials"].items() if count))
    for path in found["files"]:
        print(f"written {path}")
    best = found["best"]
    if best is None:
        errors = {study.error_of(trial) for trial in study.ended()} - {None}
        print(f"error: no trial was finished. {'; '.join(sorted(errors)[:3])}", file=sys.stderr)
        return commands.FAILED
    print(f"best: trial {best['trial']}, {found['metric']} {best['value']:.6g}, {json.dumps(best['params'])}")
    return 0


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    commands.start(main)
