"""State dicts both ways between a flax module and torch, in numpy: no torch needed."""

import re
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from torch_bridge.layouts import from_torch_dtype, named_variables, to_torch_dtype

PREFIXES = ("module.", "_orig_mod.")


class StateDictMismatch(ValueError):
    """A state dict that does not fit the model: every missing, unexpected and wrongly shaped key at once."""


def state_dict(model: nnx.Module) -> dict[str, np.ndarray]:
    """The model's parameters and buffers as host arrays under torch's keys, in torch's order; tied ones repeat."""
    return {key: to_torch_dtype(np.asarray(variable.get_value())) for key, variable in named_variables(model)}


def load_state_dict(
    model: nnx.Module, state: Mapping[str, np.ndarray], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Write `state` into the model's variables, each onto its own sharding, leaf by leaf.

    Returns the missing and the unexpected keys, as torch does. Raises StateDictMismatch naming all of them when
    `strict`, and for wrong shapes or kinds in any case; the model is then unchanged.
    Source: torch.nn.Module.load_state_dict.
    """
    wanted = dict(named_variables(model))
    missing, unexpected, wrong = compare(
        {key: (variable.shape, variable.dtype) for key, variable in wanted.items()}, state
    )
    given_ids = {id(wanted[key]) for key in wanted if key in state}
    missing = [key for key in missing if id(wanted[key]) not in given_ids]  # its tied twin was given
    if wrong or (strict and (missing or unexpected)):
        raise StateDictMismatch(explain(missing if strict else [], unexpected if strict else [], wrong))
    for key, variable in wanted.items():
        if key in state:
            variable.set_value(_place(np.asarray(state[key]), variable.get_value()))
    return missing, unexpected


def _place(array: np.ndarray, like):
    array = from_torch_dtype(array, like.dtype)
    if isinstance(like, jax.Array):
        return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
    return jax.numpy.asarray(array)


def compare(wanted: Mapping[str, tuple], state: Mapping[str, np.ndarray]):
    """Missing keys, unexpected keys, and one line per key whose shape or kind of number is wrong."""
    missing = [key for key in wanted if key not in state]
    unexpected = [key for key in state if key not in wanted]
    wrong = []
    for key, (shape, dtype) in wanted.items():
        if key not in state:
            continue
        array = state[key]
        if tuple(array.shape) != tuple(shape):
            wrong.append(f"{key} is {list(array.shape)}, the model wants {list(shape)}")
        else:
            try:
                from_torch_dtype(np.empty(0, array.dtype), dtype)
            except ValueError as error:
                wrong.append(f"{key}: {error}")
    return missing, unexpected, wrong


def explain(missing: list[str], unexpected: list[str], wrong: list[str], source: str = "the state dict") -> str:
    """One message for all that does not fit, with the likely cause."""

    def shorten(keys):
        return f" ({', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''})" if keys else ""

    text = (
        f"cannot load {source}: {len(missing)} keys missing{shorten(missing)}, {len(unexpected)} unexpected"
        f"{shorten(unexpected)}, {len(wrong)} of another shape or kind"
    )
    if wrong:
        text += ": " + "; ".join(wrong[:4]) + ("; ..." if len(wrong) > 4 else "")
    return text + ". " + _likely_cause(missing, unexpected, wrong)


def _likely_cause(missing, unexpected, wrong) -> str:
    if missing and unexpected:
        tails = {key.split(".", 1)[-1] for key in unexpected}
        if sum(key in tails for key in missing) > len(missing) // 2:
            first = unexpected[0].split(".", 1)[0]
            return f"The keys carry a prefix `{first}.`: strip it (convert_ddp_state does for `module.`)."
        heads = {key.split(".", 1)[-1] for key in missing}
        if sum(key in heads for key in unexpected) > len(unexpected) // 2:
            return f"The file holds a part of the model: load it into `{missing[0].split('.', 1)[0]}`."
    if wrong and not missing and not unexpected:
        return "The names fit, so it was trained with other sizes: compare the model section of both configs."
    depth = {match.group(1) for key in unexpected + missing if (match := re.search(r"\.(\d+)\.", key))}
    if depth and not wrong:
        return "The depth or an option of the model differs: compare the model section of both configs."
    return "Is it a checkpoint of this model? strict=False takes what fits."


def convert_ddp_state(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Strip one leading `module.` (DDP) and `_orig_mod.` (torch.compile) from every key, order kept."""
    result = dict(state)
    for prefix in PREFIXES:
        result = {key.removeprefix(prefix): value for key, value in result.items()}
    return result
