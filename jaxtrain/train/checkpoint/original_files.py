"""`checkpoint.torch: original`: write the torch project's own checkpoint files in addition to the run's."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.train.checkpoint import torch_checkpoint


def check(program: Any) -> None:
    """Raise UserError if the setting is on and such files cannot be written."""
    twin = program.task.twin
    if program.config.checkpoint.torch is None:
        return
    if twin is None or twin.checkpoint is None:
        raise UserError(
            f"checkpoint.torch: original: {program.config.task or 'your own task'} has no torch project whose "
            "files could be written; python -m jaxtrain.export --optimizer writes a torch training state"
        )
    whole = lambda array: array.is_fully_addressable or array.is_fully_replicated
    if not all(whole(array) for array in jax.tree.leaves((program.state.params, program.state.opt_state))):
        raise UserError(
            "checkpoint.torch: original: no process holds the sharded weights whole; leave it out and write them "
            "afterwards with python -m jaxtrain.export --optimizer"
        )


def write(program: Any, folder: pathlib.Path, meta: Mapping[str, Any], bad: int, due: bool, final: bool) -> None:
    """Write the files of the current state. meta: the record's, as in meta.json. bad: evaluations without improvement.

    due, final: reasons why a checkpoint is written now; `meta` shows if it is the best so far.
    """
    if program.config.checkpoint.torch is None or jax.process_index():
        return
    step = meta["step"]
    known = {name: meta[name] for name in ("step", "steps_per_epoch", "best_metrics", "train_history", "val_history")}
    known |= {"metrics": meta["last_metrics"], "epoch": step // meta["steps_per_epoch"], "bad": bad}
    known |= {"due": due, "final": final, "best": meta["best_metrics"].get("step") == step}
    program.task.twin.checkpoint(program.config, torch_checkpoint.of_program(program), folder, known)
