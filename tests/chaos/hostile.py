"""Run folders that came from elsewhere: `python -m tests.chaos.hostile`.

A small run's folder in which one thing is not what it seems: links, pipes, configs that name code, seals that lead
outside. `checkpoints verify`, `report`, `export`, `evaluate` and `run` are started on each. None may run code, touch a
file outside the folder, print a traceback or take longer than 60 seconds; the exit code is 0, 1 or 2.
"""

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable

import yaml

from jaxtrain import checkpoints, evaluate, export, report, run
from jaxtrain.runtime import plain_files
from jaxtrain.train.checkpoint import manifest
from tests.chaos import damages, runs

LIMIT_S = 60
DEEP = 100_000
Kind = Callable[[pathlib.Path, pathlib.Path], None]  # (the run folder, what lies outside)


def _link(name: str) -> Kind:
    def change(folder: pathlib.Path, outside: pathlib.Path) -> None:
        path = folder / name
        kept = outside / "folder" if path.is_dir() else outside / "file"
        plain_files.delete(path)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(kept)

    return change


def _pipe(name: str) -> Kind:
    def change(folder: pathlib.Path, outside: pathlib.Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def _text(name: str, text: str) -> Kind:
    return lambda folder, outside: (folder / name).write_text(text.replace("OUTSIDE", str(outside))) and None


def _config(**values) -> Kind:
    def change(folder: pathlib.Path, outside: pathlib.Path) -> None:
        content = yaml.safe_load((folder / "config.yaml").read_text()) | values
        (folder / "config.yaml").write_text(yaml.safe_dump(content).replace("OUTSIDE", str(outside)))

    return change


def _sealed_outside(folder: pathlib.Path, outside: pathlib.Path) -> None:
    """A seal that lists a file out of the checkpoint, with its true hash."""
    step = folder / "checkpoints/20"
    sealed = manifest.read(step)
    content = (outside / "file").read_bytes()
    told = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    name = os.path.relpath(outside / "file", step)
    (step / manifest.NAME).unlink()
    content = {**sealed, "files": {**sealed["files"], name: told}}
    (step / manifest.NAME).write_text(json.dumps({**content, "seal": manifest._hash_of(content)}))


def _step_of_no_end(folder: pathlib.Path, outside: pathlib.Path) -> None:
    (folder / "checkpoints" / ("9" * 200)).mkdir()
    (folder / "checkpoints" / "٣٠").mkdir()


def _loop(folder: pathlib.Path, outside: pathlib.Path) -> None:
    (folder / "checkpoints/20/state/again").symlink_to(folder / "checkpoints")


COMMAND = {"target": "os.system", "kwargs": {"command": "touch OUTSIDE/ran"}}
CODE = {"target": "subprocess.Popen", "kwargs": {"args": ["touch", "OUTSIDE/ran"]}}
KINDS: dict[str, Kind] = {
    **{f"{name}: a link": _link(name) for name in ("run.lock", "train.log", "metrics.jsonl", "report.html")},
    **{f"{name}: a link": _link(name) for name in ("checkpoints", "exports", "reports", "tensorboard")},
    **{f"{name}: a link": _link(name) for name in ("summary.json", "environment.json", "fingerprint.json")},
    **{
        f"{name}: a link": _link(name)
        for name in (".config.yaml.part", ".summary.json.part", ".metrics.jsonl.part", "exports/.best.pt.part")
    },
    **{f"{name}: a pipe": _pipe(name) for name in ("run.lock", "train.log", "metrics.jsonl", "config.yaml")},
    "a target: os.system": _config(task="torch_module.train", model=COMMAND),
    "a target: subprocess.Popen": _config(task="torch_module.train", model=CODE, data=CODE, loss=CODE),
    "a task of nobody's": _config(task="os.system"),
    "YAML that builds objects": _text("config.yaml", "!!python/object/apply:os.system ['touch OUTSIDE/ran']"),
    "YAML that grows": _text(
        "config.yaml",
        "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
    ),
    "YAML that nests": _text("config.yaml", "[" * DEEP),
    "a fingerprint that nests": _text("fingerprint.json", "[" * DEEP),
    "a lock that nests": _text("run.lock", "[" * DEEP),
    "metrics that nest": _text("metrics.jsonl", "[" * DEEP),
    "a seal that nests": _text("checkpoints/20/meta.json", "[" * DEEP),
    "a seal of nothing": _text("checkpoints/20/meta.json", "null"),
    "a seal that leads outside": _sealed_outside,
    "steps of no end": _step_of_no_end,
    "a link that goes round": _loop,
}


def snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder and what is in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def commands(folder: pathlib.Path) -> dict[str, Callable[[], int]]:
    at = ["--run", str(folder)]
    again = ["--config", str(runs.CONFIG), *runs.SHORT, *damages.STEPS, f"run.dir={folder}", "train.steps=25"]
    return {
        "verify": lambda: checkpoints.main(["verify", *at]),
        "report": lambda: report.main(at),
        "export": lambda: export.main([*at, "--checkpoint", "last", "--output", str(folder / "exports/w.pt")]),
        "evaluate": lambda: evaluate.main(at),
        "run": lambda: run.main(again),
    }


def attempt(command: Callable[[], int]) -> str:
    """Run a command; what is wrong with its end, or nothing."""
    said = io.StringIO()

    def too_long(*_):
        raise TimeoutError(f"it took longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = command()
    except SystemExit as error:
        code = error.code
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        logging.getLogger("jaxtrain").handlers.clear()
    if code not in (0, 1, 2) or "Traceback" in said.getvalue():
        return f"exit code {code}: {said.getvalue()[-1500:]}"
    return ""


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    arguments = p.parse_args(argv)
    good = 0
    with tempfile.TemporaryDirectory() as temporary:
        whole = pathlib.Path(temporary) / "whole"
        with contextlib.redirect_stdout(io.StringIO()):
            damages.go_on(whole)
        for kind in arguments.kinds:
            place = pathlib.Path(temporary) / "place"
            folder, outside = place / "run", place / "outside"
            (outside / "folder").mkdir(parents=True)
            (outside / "file").write_text("precious")
            shutil.copytree(whole, folder)
            KINDS[kind](folder, outside)
            before, wrong = snapshot(outside), []
            for name, command in commands(folder).items():
                wrong += [f"{name}: {found}"] if (found := attempt(command)) else []
                wrong += [f"{name}: wrote outside"] if snapshot(outside) != before else []
            wrong += (
                ["a file beside the folder"] if {path.name for path in place.iterdir()} != {"run", "outside"} else []
            )
            good += not wrong
            print(f"{kind}: {'; '.join(wrong) or 'nothing outside touched'}", flush=True)
            shutil.rmtree(place)
    print(f"{good} of {len(arguments.kinds)} hostile folders: no code, nothing outside touched, no traceback")
    return 0 if good == len(arguments.kinds) else 1


if __name__ == "__main__":
    sys.exit(main())
