"""Make all processes agree if a save has succeeded: process 0 decides."""

import dataclasses
import json
import threading
from typing import Any

import jax

from jaxtrain.runtime.launch import coordination
from jaxtrain.train.checkpoint.save_failures import reason_of
from jaxtrain.train.step.state import TrainState

OTHERS_S = 900  # time for the other processes to finish writing; orbax gives up after 600


@dataclasses.dataclass
class Saving:
    """A save in progress. error: why it failed. share: this process's part of the training stream's position. others:
    the parts of the other processes, on process 0."""

    step: int
    number: int  # counts this process's saves; all processes save in the same order
    thread: threading.Thread | None = None
    error: str = ""
    unproven: TrainState | None = None  # shapes of the first saved state, to check that it can be restored
    share: dict[str, Any] = dataclasses.field(default_factory=dict)
    others: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def hear_others(saving: Saving) -> None:
    """On process 0, collect the first error of the other processes in writing their parts, and their stream
    positions."""
    for process in range(1, jax.process_count()):
        key = f"jaxtrain/save/{saving.number}/{process}"
        word = json.loads(coordination().blocking_key_value_get(key, OTHERS_S * 1000))
        saving.error = saving.error or word["error"]
        saving.others.append(word["share"])


def agree(saving: Saving) -> None:
    """Send this process's error to process 0, and adopt the result that process 0 decides."""
    if jax.process_count() == 1:
        return
    me, prefix = jax.process_index(), f"jaxtrain/save/{saving.number}/"
    try:
        word = {"error": saving.error, "share": saving.share if me else {}}
        coordination().key_value_set(f"{prefix}{me}", json.dumps(word))
        saving.error = json.loads(coordination().blocking_key_value_get(f"{prefix}0", OTHERS_S * 1000))["error"]
    except Exception as error:
        saving.error = saving.error or reason_of(error)
