"""A save under way, which every process takes for good or for failed as process 0 does."""

import dataclasses
import json
import threading
from typing import Any

import jax

from jaxtrain.runtime.launch import coordination
from jaxtrain.train.checkpoint.save_failures import reason_of
from jaxtrain.train.step.state import TrainState

OTHERS_S = 900  # for the other processes to finish writing; orbax gives up after 600


@dataclasses.dataclass
class Saving:
    """A save under way. error: why it failed, in words. share: what this process alone knows of where the training
    stream stands; others: the same of the others, on process 0."""

    step: int
    number: int  # of this process's saves; all processes save in the same order
    thread: threading.Thread | None = None
    error: str = ""
    unproven: TrainState | None = None  # shapes of the first state that is saved: whether it restores is looked at
    share: dict[str, Any] = dataclasses.field(default_factory=dict)
    others: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def hear_others(saving: Saving) -> None:
    """On process 0: take the first error that another process met in writing its part, and what the others know."""
    for process in range(1, jax.process_count()):
        key = f"jaxtrain/save/{saving.number}/{process}"
        word = json.loads(coordination().blocking_key_value_get(key, OTHERS_S * 1000))
        saving.error = saving.error or word["error"]
        saving.others.append(word["share"])


def agree(saving: Saving) -> None:
    """Tell process 0 of this one's error, and take the outcome that it found."""
    if jax.process_count() == 1:
        return
    me, prefix = jax.process_index(), f"jaxtrain/save/{saving.number}/"
    try:
        word = {"error": saving.error, "share": saving.share if me else {}}
        coordination().key_value_set(f"{prefix}{me}", json.dumps(word))
        saving.error = json.loads(coordination().blocking_key_value_get(f"{prefix}0", OTHERS_S * 1000))["error"]
    except Exception as error:
        saving.error = saving.error or reason_of(error)
