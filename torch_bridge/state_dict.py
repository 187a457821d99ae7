"""Convert state dicts between a flax module and torch, in numpy; needs no torch."""

import contextlib
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from torch_bridge.layouts import from_torch_dtype, named_variables, to_torch_dtype
from torch_bridge.lazy_array import LazyArray, as_leaf, own_array, to_host

CHECKED_AT_ONCE = 1 << 20  # numbers; limits the extra memory of a check
PREFIXES = ("module.", "_orig_mod.")  # prefixes that DDP and torch.compile add to every key
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")  # anywhere in a key
METADATA = "_metadata"  # torch's attribute of a state dict: format version of every module, by path
COUNTER = "num_batches_tracked"  # key of batch normalisation since version 2 of its format
COUNT_OF_AVERAGED = "n_averaged"  # key of torch.optim.swa_utils.AveragedModel besides its model's keys


class StateDictMismatch(UserError):
    """Raised for a state dict that does not fit the model; lists all missing, unexpected and wrongly shaped keys."""


def state_dict(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return the model's parameters and buffers as host arrays with torch's keys and order; tied ones under each
    key."""
    arrays: dict[int, np.ndarray] = {}
    leaves = open_state_dict(model)
    return {key: arrays.setdefault(id(leaf), np.asarray(leaf)) for key, leaf in leaves.items()}


def open_state_dict(model: nnx.Module) -> dict[str, LazyArray]:
    """Return `state_dict` with LazyArrays, which are fetched from the devices one by one on use.

    All names of a tied variable share one LazyArray. Tensors that are float64 or complex128 in torch are so here, with
    torch's value where the variable, which has half as many bits, is still that value rounded.
    """
    leaves: dict[int, LazyArray] = {}
    doubles = _doubles(model)
    for key, variable in named_variables(model):
        if id(variable) not in leaves:
            leaf = leaf_of(variable)
            leaves[id(variable)] = _as_double(leaf, doubles[key]) if key in doubles else leaf
    return {key: leaves[id(variable)] for key, variable in named_variables(model)}


def _doubles(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return the values that a converted torch module's float64 and complex128 tensors were given; {} for others."""
    return getattr(model, "doubles", {})


def _as_double(leaf: LazyArray, given: np.ndarray) -> LazyArray:
    """Return the leaf in the dtype of `given`: with its values where the leaf's are those rounded."""

    def read() -> np.ndarray:
        rounded = leaf.read()
        with np.errstate(over="ignore"):
            same = np.array_equal(given.astype(rounded.dtype), rounded, equal_nan=True)
        return given.copy() if same else rounded.astype(given.dtype)

    return LazyArray(leaf.shape, given.dtype, read)


def leaf_of(array: Any) -> LazyArray:
    """Return a variable or JAX array as a LazyArray with torch's dtype."""
    dtype = to_torch_dtype(np.empty(0, array.dtype)).dtype
    value = array.get_value() if isinstance(array, nnx.Variable) else array
    return LazyArray(tuple(array.shape), dtype, lambda: to_torch_dtype(to_host(value)))


def load_state_dict(
    model: nnx.Module, state: Mapping[str, Any], strict: bool = True, source: str = "the state dict"
) -> tuple[list[str], list[str]]:
    """Write `state` into the model's variables, array by array, each with the variable's sharding.

    state: arrays, torch tensors or LazyArrays; prefixes of DDP and torch.compile are stripped. The counter of batch
    normalisation may be missing if the state's format has none, as in a state dict without torch's versions.
    Returns the missing and the unexpected keys, as torch does. Raises StateDictMismatch listing all of them if
    `strict`, and for wrong shapes or dtypes in any case; the model is then unchanged.
    Source: torch.nn.Module.load_state_dict.
    """
    wanted = dict(named_variables(model))
    state = without_wrappers(state, wanted)
    formats = versions(state)
    state = {key: as_leaf(value) for key, value in state.items()}
    missing, unexpected, wrong = compare(
        {key: (variable.shape, variable.dtype) for key, variable in wanted.items()}, state
    )
    given_ids = {id(wanted[key]) for key in wanted if key in state}
    missing = [key for key in missing if id(wanted[key]) not in given_ids]  # given under another tied name
    missing = [key for key in missing if not _older(key, formats)]
    if wrong or (strict and (missing or unexpected)):
        raise StateDictMismatch(explain(missing if strict else [], unexpected if strict else [], wrong, source))
    doubles = _doubles(model)
    for key, variable in wanted.items():
        if key in state:
            variable.set_value(place(state[key], variable.get_value()))
            if key in doubles:
                doubles[key] = own_array(state[key]).astype(doubles[key].dtype, copy=False)
    return missing, unexpected


def _older(key: str, formats: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return True if the state's format version lacks this key; the model then keeps its value, as in torch."""
    path, _, name = key.rpartition(".")
    return name == COUNTER and (formats.get(path, {}).get("version") or 1) < 2


def versions(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return torch's format versions of all modules in a state dict; empty if they were not kept."""
    return getattr(state, METADATA, None) or {}


def with_versions(state: Mapping[str, Any], formats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict with these format versions attached, as torch's own `state_dict()` does."""
    kept = OrderedDict(state)
    if formats:
        setattr(kept, METADATA, OrderedDict(formats))
    return kept


def renamed(state: Mapping[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """Return the state dict with renamed keys; rename the modules of its format versions accordingly."""
    held, formats = versions(state), {}
    for key in state if held else ():
        old, new = key, name(key)
        while old and new:
            old, new = old.rpartition(".")[0], new.rpartition(".")[0]
            if old in held:
                formats.setdefault(new, held[old])
    return with_versions({name(key): value for key, value in state.items()}, formats)


def place(value: Any, like: Any) -> jax.Array:
    """Copy an array, LazyArray or number to the dtype and sharding of `like`.

    Waits until the copy is complete, so that only one array of a checkpoint is in flight at a time.
    """
    array = from_torch_dtype(own_array(value), like.dtype)
    with jax.enable_x64(True) if array.dtype == np.int64 else contextlib.nullcontext():
        if isinstance(like, jax.Array):
            array = jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
            return array.block_until_ready()
        return jax.numpy.asarray(array)


def without_wrappers(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with the model's own keys: remove the prefixes of DDP, FSDP, torch.compile, activation
    checkpointing and AveragedModel, around the model or a part of it. AveragedModel's count of averages is removed
    too."""

    def own(key: str) -> str:
        if key in wanted:
            return key
        parts = [part for part in key.split(".") if part not in WRAPPERS]
        short = ".".join(parts)
        while short not in wanted and short.startswith("module."):
            short = short.removeprefix("module.")
        inside = ".".join(part for part in parts if part != "module")  # DDP around a part of the model
        short = inside if short not in wanted and inside in wanted else short
        return key if short in state else short

    averaged = COUNT_OF_AVERAGED in state and COUNT_OF_AVERAGED not in wanted
    averaged = averaged and all(key.startswith("module.") or key == COUNT_OF_AVERAGED for key in state)
    found = renamed(state, own)
    if averaged:
        del found[COUNT_OF_AVERAGED]
    return found


def not_finite(model: nnx.Module, state: Mapping[str, Any]) -> list[str]:
    """Return keys with values that training cannot survive: NaN anywhere, infinity in a parameter (masks may contain
    it)."""
    keys = []
    for key, variable in named_variables(model):
        if key in state and jax.numpy.issubdtype(state[key].dtype, jax.numpy.floating):
            flat = np.asarray(state[key]).reshape(-1)
            parts = np.array_split(flat, flat.size // CHECKED_AT_ONCE + 1)
            bad = (lambda part: ~np.isfinite(part)) if isinstance(variable, nnx.Param) else np.isnan
            keys += [key] if any(bad(part).any() for part in parts) else []
    return keys


def compare(wanted: Mapping[str, tuple], state: Mapping[str, np.ndarray]):
    """Return missing keys, unexpected keys, and one line per key whose shape or kind of number is wrong."""
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
    """Return one message for everything that does not fit, with the likely cause."""

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
            return f"Most keys carry a prefix `{first}.`: strip it, and leave out what is not of this model."
        heads = {key.split(".", 1)[-1] for key in missing}
        if sum(key in heads for key in unexpected) > len(unexpected) // 2:
            return f"The file holds a part of the model: load it into `{missing[0].split('.', 1)[0]}`."
    if wrong and not missing and not unexpected:
        if all(": it holds " in line for line in wrong):
            return "Names and sizes fit: convert the file's numbers."
        return "The names fit, so it was trained with other sizes: compare the model section of both configs."
    depth = {match.group(1) for key in unexpected + missing if (match := re.search(r"\.(\d+)\.", key))}
    if depth and not wrong:
        return "The depth or an option of the model differs: compare the model section of both configs."
    return "Is it a checkpoint of this model? strict=False takes what fits."


def convert_ddp_state(state: Mapping[str, np.ndarray]) -> OrderedDict[str, np.ndarray]:
    """Strip one leading `module.` (DDP) and `_orig_mod.` (torch.compile) from every key; keep the order."""
    result = OrderedDict(state)  # as torch's own state_dict()
    for prefix in PREFIXES:
        result = OrderedDict((key.removeprefix(prefix), value) for key, value in result.items())
    return result
