"""Describe how a checkpoint's arrays differ from those that a run needs."""

import pathlib
from collections.abc import Collection, Mapping

SHOWN = 6  # most differences in a message
TRAINED = {"params": "trained", "frozen": "frozen"}  # how messages call the parameters of each part
Shapes = Mapping[str, tuple]  # by name: "params.head.weight", "opt_state.mu.head.weight"


def sentence(have: Shapes, want: Shapes, path: pathlib.Path, optimizer: bool = True) -> str:
    """Return the message for a checkpoint that does not fit; "" for one that does.

    have, want: arrays of the checkpoint, and of the run. path: the checkpoint's, in its run folder. optimizer: False
    ignores the optimizer's state.
    """
    retrained = _retrained(have, want)
    weights = _others(have, want, retrained)
    state = _of_optimizer(have, want, retrained) if optimizer else []
    lines = [*(f"{key} was {then} and is {now} here" for key, (then, now) in retrained.items()), *weights, *state]
    if not lines:
        return ""
    shown = "\n  ".join(lines[:SHOWN]) + (f"\n  ... and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
    advice = "Use the config it was trained with (config.yaml beside it), or another run.dir to start afresh"
    if not weights:
        folder = path.parent.parent.parent
        advice = f"The weights fit: init_from={folder} and another run.dir start a new run from them"
    count = "1 difference" if len(lines) == 1 else f"{len(lines)} differences"
    return f"{path}: the checkpoint does not fit this config, {count}:\n  {shown}\n{advice}"


def _retrained(have: Shapes, want: Shapes) -> dict[str, tuple[str, str]]:
    """Return parameters that were trained and are frozen now, or vice versa: name -> ("trained", "frozen")."""
    found = {}
    for key in want:
        part, _, name = key.partition(".")
        other = {"params": "frozen", "frozen": "params"}.get(part)
        if other and have.get(f"{other}.{name}") == want[key] and key not in have:
            found[name] = TRAINED[other], TRAINED[part]
    return found


def _others(have: Shapes, want: Shapes, retrained: Collection[str]) -> list[str]:
    """Return the differences outside the optimizer's state."""
    counts = lambda key: not key.startswith("opt_state.") and key.partition(".")[2] not in retrained
    return _listed({k: v for k, v in have.items() if counts(k)}, {k: v for k, v in want.items() if counts(k)})


def _of_optimizer(have: Shapes, want: Shapes, retrained: Collection[str]) -> list[str]:
    """Return the differences of the optimizer's state, except for parameters that only one of the two trains."""
    names = {key.partition(".")[2] for shapes in (have, want) for key in shapes if key.partition(".")[0] in TRAINED}
    entries = [
        {key: (*_parts_of(key.removeprefix("opt_state."), names), shape) for key, shape in shapes.items()}
        for shapes in ({k: v for k, v in s.items() if k.startswith("opt_state.")} for s in (have, want))
    ]
    theirs, ours = ({kind for kind, _, _ in held.values()} for held in entries)
    if theirs != ours:
        told = lambda kinds: ", ".join(sorted(kinds)) or "nothing"
        return [f"it is of another optimizer, whose state is {told(theirs)}; this run's is {told(ours)}"]
    saved, wanted = (
        {key: shape for key, (_, name, shape) in held.items() if name not in retrained} for held in entries
    )
    return _listed(saved, wanted)


def _parts_of(key: str, names: Collection[str]) -> tuple[str, str]:
    """Split the key of an optimizer state's entry into its kind and its parameter: "mu", "head.weight"."""
    parts = key.split(".")
    for first in range(len(parts)):
        for end in range(len(parts), first, -1):
            if (name := ".".join(parts[first:end])) in names:
                return ".".join(parts[:first] + parts[end:]), name
    return key, ""


def _listed(have: Shapes, want: Shapes) -> list[str]:
    keys = sorted(want, key=lambda key: not key.startswith("params."))  # weights say more than moments
    lines = [
        f"{key} is {list(have[key])}, the config wants {list(want[key])}"
        for key in keys
        if key in have and have[key] != want[key]
    ]
    lines += [f"{key} is missing from the checkpoint" for key in keys if key not in have]
    return lines + [f"{key} is unknown to the config" for key in have if key not in want]
