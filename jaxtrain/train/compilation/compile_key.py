"""Compute the key of compiled programs: runs with the same key share them, however their numbers differ."""

import json
from typing import Any

from jaxtrain.task import Task

NOT_CODE = ("run", "tracking", "checkpoint", "profile", "init_from", "init_optimizer", "init_strict")
RATES = ("lr", "weight_decay", "clip_norm")


def code_of(config: Any, task: Task) -> str:
    """Everything but what the step takes as numbers: rates, schedule, the task's own numbers. 0 and null compile other
    code than a number does."""
    values = config.model_dump(mode="json")
    for name in NOT_CODE:
        values.pop(name)
    optim = values["optim"]
    optim.pop("schedule")  # a table
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
    """The top-level sections in which the code of two configs differs."""
    one, other = json.loads(code_of(first, task)), json.loads(code_of(second, task))
    return [name for name in one if one[name] != other[name]]
