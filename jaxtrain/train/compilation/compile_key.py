"""Compute the cache key of compiled programs: runs that differ only in numbers have the same key and share them."""

import json
from typing import Any

from jaxtrain.task import Task

NOT_CODE = ("run", "tracking", "checkpoint", "profile", "init_from", "init_optimizer", "init_strict")
RATES = ("lr", "weight_decay", "clip_norm")


def code_of(config: Any, task: Task) -> str:
    """Return the config as JSON without the values that the step takes as arrays: rates, schedule, the task's own
    numbers. Of those it keeps if they are null or 0, which compile to other code than a number."""
    values = config.model_dump(mode="json")
    for name in NOT_CODE:
        values.pop(name)
    optim = values["optim"]
    optim.pop("schedule")  # enters the step as a table
    optim["layer_decay"] = optim["layer_decay"] is not None
    for section in (optim, *optim["groups"].values()):
        section.update({key: section.get(key) is not None for key in RATES})
    for key in task.traced_hparams:
        *sections, leaf = key.split(".")
        section = values
        for name in sections:
            section = section[name]
        if isinstance(section[leaf], (int, float)):
            section[leaf] = isinstance(section[leaf], int) or section[leaf] != 0
    return json.dumps(values, sort_keys=True)


def differences(first: Any, second: Any, task: Task) -> list[str]:
    """Return the top-level sections in which two configs differ by more than numbers."""
    one, other = json.loads(code_of(first, task)), json.loads(code_of(second, task))
    return [name for name in one if one[name] != other[name]]
