"""Checks that refuse modules before anything is captured."""

import itertools
import keyword
import logging
from collections.abc import Iterator

import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.lowering.errors import ADVICE_READY, Obstacle, UnsupportedModel

log = logging.getLogger(__name__)


def check_ready(module: torch.nn.Module, rounds: bool = True) -> None:
    """Raise UserError for a module that cannot be trained whatever its code: scripted, quantized or lazy parts,
    parameters that share memory. rounds: float64 parameters are computed with in float32, which a warning says."""
    bare = _without_init(module)  # its tensors cannot be listed
    found = [bare] if bare else [*unready(module), *_shared(module)]
    if found:
        raise UserError(str(UnsupportedModel(type(module).__name__, found, ADVICE_READY)))
    if rounds and any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        log.warning("%s has float64 parameters: they are computed with in float32", type(module).__name__)


def unready(module: torch.nn.Module) -> Iterator[Obstacle]:
    """Yield submodules that can never be exported, whatever their code."""
    if bare := _without_init(module):
        yield bare
        return
    if circle := _circle(module, [], set()):
        what = "it holds a module that holds it, so that names never end: keep a parent in a list, self.up = [parent]"
        yield Obstacle(what, module=circle)
        return
    for name, inner in module.named_modules():
        name = name.removeprefix("wrapped_module").removeprefix(".")
        key = name.rpartition(".")[2]
        if keyword.iskeyword(key):
            what = f"its name, {key}, is a keyword of Python's, which no graph can write: rename the module"
            yield Obstacle(what, module=name)
        if isinstance(inner, torch.jit.ScriptModule):
            yield Obstacle("it is compiled by torch.jit; give the module that was scripted or traced", module=name)
            return
        if ".nn.quantized." in type(inner).__module__ or ".intrinsic.quantized." in type(inner).__module__:
            yield Obstacle(
                "it is quantized, and JAX trains floating-point weights; give the module before", module=name
            )
            return
        if any(torch.nn.parameter.is_lazy(p) for p in inner.parameters(recurse=False)):
            kind = type(inner).__name__
            yield Obstacle(f"a {kind} has no weights yet; call module(*inputs) once in torch", module=name or kind)
        for key, tensor in itertools.chain(inner.named_parameters(recurse=False), inner.named_buffers(recurse=False)):
            if tensor.is_meta:
                yield Obstacle(
                    f"{key} is on the meta device and has no numbers: load them, load_state_dict(state, assign=True), "
                    'or module.to_empty(device="cpu") and set them',
                    module=name,
                )
                return


def _without_init(module: torch.nn.Module) -> Obstacle | None:
    """Return the first submodule whose class forgot torch.nn.Module's __init__; None if there is none."""
    waiting, seen = [("", module)], set()
    while waiting:
        path, inner = waiting.pop()
        if isinstance(inner, torch.jit.ScriptModule):
            continue  # it keeps its parts elsewhere
        if "_modules" not in vars(inner):
            what = f"{type(inner).__name__}.__init__ does not call super().__init__(), which it has to do first"
            return Obstacle(what, module=path)
        if id(inner) not in seen:
            seen.add(id(inner))
            parts = [(name, part) for name, part in inner._modules.items() if part is not None]
            waiting += [(f"{path}.{name}".removeprefix("."), part) for name, part in parts]
    return None


def _circle(module: torch.nn.Module, above: list[torch.nn.Module], done: set[int]) -> str:
    """Return the path to a submodule that is also among those that hold it; "" if there is none. done: ids of modules
    without such a path."""
    above = [*above, module]
    for key, inner in module._modules.items():
        if inner is not None and id(inner) not in done:
            within = "" if any(inner is outer for outer in above) else _circle(inner, above, done)
            if within or any(inner is outer for outer in above):
                return f"{key}.{within}".rstrip(".")
    done.add(id(module))
    return ""


def _shared(module: torch.nn.Module) -> Iterator[Obstacle]:
    """Yield trained tensors whose memory has another use too: each tensor is an array of its own in JAX."""
    places: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if _in_memory(tensor):
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for here in places.values():
        for name, tensor in here:
            if _trained(tensor) and _elements(tensor).size < tensor.numel():
                yield Obstacle(f"{name} is expanded: several of its elements are one number; clone it", module=name)
        for (name, tensor), (other_name, other) in itertools.combinations(here, 2):
            if (_trained(tensor) or _trained(other)) and _overlap(tensor, other):
                yield Obstacle(
                    f"{name} and {other_name} share memory and are trained apart in JAX; make them one parameter "
                    "(b.weight = a.weight instead of b.weight.data = a.weight.data), or clone one"
                )


def _in_memory(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.numel() > 0 and not tensor.is_meta and not torch.nn.parameter.is_lazy(tensor)


def _trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (first, last), (begin, end) = _reach(a), _reach(b)
    if last <= begin or end <= first:
        return False
    if a.dtype != b.dtype:
        return True
    return bool(np.intersect1d(_elements(a), _elements(b), assume_unique=True).size)


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the tensor begins and ends in its storage, in bytes."""
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size


def _elements(tensor: torch.Tensor) -> np.ndarray:
    """Return the positions of its elements within the storage, each once, in order."""
    begin = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return np.arange(begin, begin + tensor.numel())
    numbers = np.array([begin])
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers = np.unique(numbers[:, None] + stride * np.arange(length if stride else 1))
    return numbers


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of the module's first tensor; the CPU if it has none."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
