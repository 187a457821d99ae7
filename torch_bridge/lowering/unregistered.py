"""Say where a module keeps a tensor that takes a gradient and that torch does not count among its parameters."""

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

MOST_OBJECTS = 10_000  # that are looked at: what follows is not read out of a module's attributes but out of its data

_ELSEWHERE = (
    "a {kind} from outside the module takes a gradient here, and nobody would train it: keep it in the module "
    "(self.w = torch.nn.Parameter(w), self.part = part); or give the module that has it too, as the loss (Trainer(..., "
    "loss=module)) or to jaxtrain.compile_many; if it shall stay as it is, call requires_grad_(False) on it"
)
_LISTS = (list, tuple, set, frozenset, deque)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, bytes, int, float, complex)


def refusal(module: torch.nn.Module | None, tensor: torch.Tensor) -> str:
    """Return why a tensor that the module uses is trained by nobody, where the module keeps it, and what to write."""
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    if not tensor.is_leaf:
        kind += " that is computed from others"
    for path, inner in _modules(module):
        for attribute, value in list(vars(inner).items()):
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for place, holder in _places(value, attribute, tensor):
                full = f"{path}.{place}".removeprefix(".")
                return _sentence(full, attribute, type(inner).__name__, value, holder, tensor)
    return _ELSEWHERE.format(kind=kind)


def _modules(module: torch.nn.Module | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the user's modules with their paths; around them is one of ours."""
    for path, inner in module.named_modules() if module is not None else ():
        if not type(inner).__module__.startswith("torch_bridge."):
            yield path.removeprefix("wrapped_module").removeprefix("."), inner


def _sentence(
    place: str, attribute: str, owner: str, value: Any, holder: torch.nn.Module | None, tensor: torch.Tensor
) -> str:
    """holder: the module that has the tensor as its parameter; None for a tensor by itself."""
    if not tensor.is_leaf:
        return (
            f"{place} is no parameter but was computed from one before the call: the optimizer's updates never reach "
            "it, and torch goes back through its computation only once. Compute it in forward"
        )
    sort, plural = ("Parameter", "parameters") if holder is None else ("Module", "modules")
    container = next((one for one in (dict, *_LISTS) if issubclass(type(value), one)), None)
    if container is not None:
        where = f"torch does not look for {plural} in a {container.__name__}"
        form = f"torch.nn.{sort}" + ("Dict({...})" if container is dict else "List([...])")
        remedy = f"Write self.{attribute} = {form}"
    elif holder is not None or place.rpartition(".")[2] != attribute:
        where = f"torch looks for {plural} in attributes of modules only"
        part = "the module that has it" if holder is not None else "it, as a torch.nn.Parameter,"
        remedy = f"Assign {part} to an attribute of {owner} too"
    else:
        where = "it is a plain tensor"
        remedy = f"Write self.{attribute} = torch.nn.Parameter(...)"
    return (
        f"{owner} uses {place}, which is no parameter of it: {where}, so parameters() and state_dict() lack it, nobody "
        f"would train it and no file would have it. {remedy}; if it shall stay as it is, call requires_grad_(False) on "
        "it"
    )


def _places(value: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.nn.Module | None]]:
    """Yield how a tensor is reached from a value of this name, and the module whose parameter it is. No code of the
    objects on the way is run."""
    waiting, seen = deque([(name, value)]), set()
    while waiting and len(seen) < MOST_OBJECTS:
        path, one = waiting.popleft()
        if one is tensor:
            yield path, None
        if id(one) in seen or issubclass(type(one), (torch.Tensor, *_OPAQUE)):
            continue
        seen.add(id(one))
        if issubclass(type(one), torch.nn.Module):
            for key, parameter in torch.nn.Module.named_parameters(one):
                if parameter is tensor:
                    yield f"{path}.{key}", one
        elif issubclass(type(one), dict):
            waiting += [(f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[...]", part)
                        for key, part in list(dict.items(one))]  # fmt: skip
        elif issubclass(type(one), _LISTS):
            base = next(base for base in _LISTS if issubclass(type(one), base))
            waiting += [(f"{path}[{number}]", part) for number, part in enumerate(base.__iter__(one))]
        else:
            waiting += [(f"{path}.{key}", part) for key, part in _attributes(one).items() if isinstance(key, str)]


def _attributes(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none
        return {}
    return dict(found) if type(found) is dict else {}
