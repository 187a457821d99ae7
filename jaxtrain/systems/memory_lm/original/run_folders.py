"""Choose run folders of this project inside the original's output_dir, next to its checkpoint folders."""

import itertools
import json
import math
import pathlib
from typing import Any


def unused(first: pathlib.Path, numbered: pathlib.Path) -> pathlib.Path:
    """Return the first of `first`, `numbered`-2, `numbered`-3, ... that holds no run."""
    others = (numbered.with_name(f"{numbered.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if not holds_run(folder))


def holds_run(folder: pathlib.Path) -> bool:
    """Return True if the folder holds a checkpoint of a run of this project."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())


def parent(folder: str) -> pathlib.Path:
    return pathlib.Path(folder).expanduser().resolve().parent


def counters(folder: str) -> dict[str, Any]:
    """Return the Trainer attributes that an original checkpoint folder stores in trainer_state.json."""
    saved = json.loads((pathlib.Path(folder).expanduser() / "trainer_state.json").read_text())
    best = saved.get("best_loss")
    names = ("global_step", "epoch", "patience_counter")
    return {name: int(saved.get(name, 0)) for name in names} | {"best_loss": math.inf if best is None else best}


def claim(engine: Any, first: pathlib.Path, numbered: pathlib.Path) -> None:
    """Set the engine's run folder to one without an earlier run, the same on every process."""
    from jaxtrain.runtime.launch import broadcast_from_process_zero

    folder = pathlib.Path(broadcast_from_process_zero("run folder", lambda: str(unused(first, numbered))))
    program = engine.program
    run = program.config.run.model_copy(update={"dir": str(folder)})
    program.config = program.config.model_copy(update={"run": run})
    if folder != first:
        print(f"{first} holds an earlier run: this one's records are in {folder}", flush=True)
