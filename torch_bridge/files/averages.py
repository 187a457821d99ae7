"""Find averaged weights (EMA) in the forms in which training loops save them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError
from torch_bridge.files.checkpoint import inside
from torch_bridge.lazy_array import is_leaf
from torch_bridge.state_dict import without_wrappers

LISTED = "shadow_params"  # key of torch_ema and diffusers: averages in the order of the given parameters
NAMED = "shadow"  # key of loops with averages of their own: by parameter name


def averages(
    saved: Mapping[str, Any], shapes: Mapping[str, tuple], order: Sequence[str], source: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the average of every parameter from a file's averages, and a note if their order had to be assumed.

    saved: a state dict (also of torch.optim.swa_utils.AveragedModel or timm), one inside a dict with other values, or
    the list that torch_ema and diffusers save. shapes: shapes of the trained parameters, by name. order: all parameters
    of the model in torch's order. Raises UserError if the average of a parameter is missing or has another shape.
    """
    listed, told = saved.get(LISTED), []
    if isinstance(listed, (list, tuple)):
        trained = [key for key in order if key in shapes]
        names = trained if len(listed) == len(trained) else list(order)
        found = dict(zip(names, listed, strict=True)) if len(listed) == len(names) else {}
        told = ["the file's average does not name its parameters: taken in the order of model.parameters()"]
    else:
        named = saved.get(NAMED)
        found = without_wrappers(inside(named if isinstance(named, Mapping) else saved), shapes)
        prefix = _prefix(found, list(shapes))
        found = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    held = {key: tuple(value.shape) for key, value in found.items() if is_leaf(value)}
    wrong = [key for key, shape in shapes.items() if held.get(key) != tuple(shape)]
    if wrong:
        got = f"of {list(held[wrong[0]])}, wanted {list(shapes[wrong[0]])}" if wrong[0] in held else "absent"
        raise UserError(
            f"{source}: its averaged weights do not fit this model: that of {wrong[0]} is {got} ({len(wrong)} such "
            "parameters). Begin the average anew without them (save the file without its average), or take the "
            "weights alone: init_optimizer=false"
        )
    return {key: found[key] for key in shapes}, told


def _prefix(state: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the prefix of the averages' keys, "" if there is none. A file of ema_pytorch also holds the trained model,
    under another prefix."""
    ends = {key.removesuffix(names[0]) for key in state if key == names[0] or key.endswith(f".{names[0]}")}
    held = [prefix for prefix in ends if all(prefix + name in state for name in names)]
    return min(held, key=lambda prefix: (prefix != "", not prefix.startswith("ema"), prefix), default="")
