"""Parameter groups: which group each parameter is in, the group's learning rate, and the epochs in which it trains.

A group of `optim.groups` selects parameters by pattern (`match`), or is a group that the task names. With
`optim.layer_decay` every group is divided by depth: `encoder@3` lies three layers below the top.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtrain.errors import UserError

if TYPE_CHECKING:  # a command's --help imports this file, and pydantic is slow to import
    from jaxtrain.config import GroupConfig, OptimConfig

DEPTH = "@"


def name_of(optim: "OptimConfig", key: str, own: str) -> str:
    """Return the group of a parameter: the first one whose pattern matches, else `own`, the task's group."""
    for name, group in optim.groups.items():
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in group.patterns):
            return name
    return own


def is_fixed(optim: "OptimConfig", name: str) -> bool:
    """Return True if a group never trains."""
    return name in optim.groups and optim.groups[name].freeze


def boundaries(optim: "OptimConfig") -> list[int]:
    """Return the epochs, counted from 0, at whose beginning a group starts or stops training."""
    groups = optim.groups.values()
    return sorted({n for group in groups for n in (group.freeze_until_epoch, group.freeze_after_epoch) if n})


def rests(group: "GroupConfig | None", epoch: int) -> bool:
    """Return True if a group does not train in an epoch, counted from 0."""
    if group is None:
        return False
    begun = group.freeze_until_epoch is None or epoch >= group.freeze_until_epoch
    return not begun or (group.freeze_after_epoch is not None and epoch >= group.freeze_after_epoch)


def check(optim: "OptimConfig", members: Mapping[str, str]) -> None:
    """Raise UserError if a group of the config has no parameter. members: key -> group, for all parameters."""
    for name in optim.groups:
        if name in members.values():
            continue
        patterns = optim.groups[name].patterns
        if not patterns:
            known = ", ".join(sorted(set(members.values())))
            raise UserError(
                f"optim.groups: {name} unknown; this task has the groups {known}. Your own group needs a pattern: "
                f"optim.groups.{name}.match='encoder.*'"
            )
        taken = [key for key in members if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
        if taken:
            raise UserError(
                f"optim.groups: {name} matches {len(taken)} parameters ({taken[0]}, ...), and all of them are in an "
                f"earlier group ({members[taken[0]]}): the first match wins, so list the narrower one first"
            )
        near = difflib.get_close_matches(patterns[0], list(members), 1, 0.3) or list(members)[:1]
        raise UserError(f"optim.groups: {name}: no parameter matches {patterns[0]!r}; one is called {near[0]}")


def depths(order: Sequence[str]) -> dict[str, int]:
    """Return how many layers each parameter lies below the top, for optim.layer_decay.

    order: keys in the order in which the model registers them. Layers are the numbered entries of its longest list of
    blocks. Parameters registered before the first block are one layer below it (embeddings); those after the last block
    are the top (norm, head). Raises UserError for a model without such a list. Source: Bao et al. 2022 (BEiT),
    appendix; timm's param_groups.
    """
    lists: dict[str, dict[int, None]] = {}
    place: dict[str, tuple[str, int]] = {}
    for key in order:
        parts = key.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            place[key] = ".".join(parts[:number]), int(parts[number])
            lists.setdefault(place[key][0], {})[place[key][1]] = None
    longest = max(lists, key=lambda name: len(lists[name]), default=None)
    if longest is None or len(lists[longest]) < 2:
        raise UserError("optim.layer_decay: the model has no list of numbered blocks, as layers.0, layers.1, ...")
    blocks = sorted(lists[longest])
    found, layer = {}, 0
    for key in order:
        inside = key in place and place[key][0] == longest
        if inside:
            layer = len(blocks) + 1
        found[key] = len(blocks) + 1 - (1 + blocks.index(place[key][1]) if inside else layer)
    return found


def labels(optim: "OptimConfig", members: Mapping[str, str], order: Sequence[str]) -> dict[str, str]:
    """Return the label of every parameter: its group, with its depth if there is layer decay."""
    if optim.layer_decay is None:
        return dict(members)
    depth = depths(order)
    return {key: f"{name}{DEPTH}{depth[key]}" for key, name in members.items()}


def rates(optim: "OptimConfig", names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the peak learning rate and the weight decay of each label."""
    found: dict[str, dict[str, float]] = {"lr": {}, "weight_decay": {}}
    for label in sorted(names):
        name, _, depth = label.partition(DEPTH)
        group = optim.group(name)
        lr = optim.lr if group.lr is None else group.lr
        found["lr"][label] = lr * (optim.layer_decay or 1.0) ** int(depth or 0)
        found["weight_decay"][label] = optim.weight_decay if group.weight_decay is None else group.weight_decay
    return found


def describe(optim: "OptimConfig", members: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    """Return a line of text on every group. members, sizes: of all parameters, also those that never train."""
    lines = []
    for name in dict.fromkeys([*optim.groups, *members.values()]):
        keys = [key for key, group in members.items() if group == name]
        if not keys:
            continue
        group = optim.group(name)
        lr = optim.lr if group.lr is None else group.lr
        when = " frozen" if group.freeze else f" lr {lr:g}"
        when += f", frozen until epoch {group.freeze_until_epoch}" if group.freeze_until_epoch else ""
        when += f", frozen after epoch {group.freeze_after_epoch}" if group.freeze_after_epoch else ""
        unmatched = "" if name in optim.groups else " (no group of optim.groups matches: "
        unmatched += "" if not unmatched else ", ".join(keys[:3]) + (", ...)" if len(keys) > 3 else ")")
        total = sum(sizes[key] for key in keys)
        lines.append(f"group {name}: {len(keys)} parameters, {total:,} numbers,{when}{unmatched}")
    return lines
