"""Place a Trainer's runs of this project in the original's output_dir, beside its checkpoint folders."""

import itertools
import json
import math
import pathlib
from typing import Any


def unused(first: pathlib.Path, numbered: pathlib.Path) -> pathlib.Path:
    """Return `first`, or where that holds a run, `numbered`-2, `numbered`-3, ..., the first that holds none."""
    others = (numbered.with_name(f"{numbered.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if not holds_run(folder))


def holds_run(folder: pathlib.Path) -> bool:
    """Return True if a run of this project has saved a checkpoint there."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())


def parent(folder: str) -> pathlib.Path:
    return pathlib.Path(folder).expanduser().resolve().parent


def counters(folder: str) -> dict[str, Any]:
    """The attributes of a Trainer that a checkpoint folder of the original holds in trainer_state.json."""
    saved = json.loads((pathlib.Path(folder).expanduser() / "trainer_state.json").read_text())
    best = saved.get("best_loss")
    names = ("global_step", "epoch", "patience_counter")
    return {name: int(saved.get(name, 0)) for name in names} | {"best_loss": math.inf if best is None else best}


def claim(engine: Any, first: pathlib.Path, numbered: pathlib.Path) -> None:
    """Give an engine a run folder that no earlier run is in, the same one on every process."""
    from jaxtrain.runtime.launch import broadcast_from_process_zero

    folder = pathlib.Path(broadcast_from_process_zero("run folder", lambda: str(unused(first, numbered))))
    program = engine.program
    run = program.config.run.model_copy(update={"dir": str(folder)})
    program.config = program.config.model_copy(update={"run": run})
    if folder != first:
        print(f"{first} holds an earlier run: this one's records are in {folder}", flush=True)
