"""How losses and metrics of a user's own are called: (output, batch) or (output, target)."""

import inspect
from collections.abc import Callable

TARGETS = ("labels", "label", "target", "targets", "y")  # entries of a batch that are the target, the first found
_NAMES = {*TARGETS, "t", "gt", "truth", "true", "y_true", "ytrue", "tgt", "ground_truth"}


def names_target(function: Callable) -> bool:
    """Tell whether the function's second argument is named as a target is."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a function without a signature nothing is known
        return False
    return len(names) > 1 and names[1].strip("_").lower() in _NAMES
