"""Put what stands for a parameter in a record where code holds the parameter: `p in self.decayed` is as in torch.

Torch records a module with other tensors in place of its parameters and buffers. User code may hold them elsewhere too:
in a list, as the keys of a dict, by their `id`.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.places import value_at
from torch_bridge.lowering.recording import shown_types


@contextlib.contextmanager
def everywhere(inputs: PythonInputs | None) -> Iterator[None]:
    """While active, in a call that is recorded, the places and keys of `inputs` that hold a parameter or buffer of a
    recorded module hold its stand-in."""
    pairs = [(before, now) for before, now in inputs.exchanged() if before is not now] if inputs else []
    if inputs is None or not pairs:
        yield
        return
    stand_ins = {id(before): now for before, now in pairs}
    places = [*inputs.held, *inputs.links(), *inputs.registered]
    places = [place for place in places if not isinstance(place.container, tuple)]
    known = [(place, before) for place in places if (before := value_at(place)) is not None]
    held = [(place, before, _exchanged(before, stand_ins)) for place, before in known]
    held = [(place, before, new) for place, before, new in held if new is not before]
    keyed = [keys for keys in inputs.keyed() if any(id(key) in stand_ins for key in keys)]
    try:
        for place, _, new in held:
            place.container[place.key] = new
        for keys in keyed:
            _exchange(keys, stand_ins)
        with shown_types.with_ids({id(now): id(before) for before, now in pairs}):
            yield
    finally:
        back = {id(now): before for before, now in pairs}
        for keys in keyed:
            _exchange(keys, back)
        for place, before, new in held:
            if value_at(place) is new:  # the call has not set it
                place.container[place.key] = before


@contextlib.contextmanager
def as_parameters(module: torch.nn.Module) -> Iterator[None]:
    """While active, tensors that are registered as parameters pass for some, as torch.export wants:
    `log_alpha = torch.zeros(1, requires_grad=True)`."""
    plain = [tensor for tensor in module.parameters() if not isinstance(tensor, torch.nn.Parameter)]
    try:
        for tensor in plain:
            tensor._is_param = True
        yield
    finally:
        for tensor in plain:
            del tensor._is_param


def _exchanged(value: Any, tensors: Mapping[int, Any]) -> Any:
    """Return the new tensor for one, a tuple or a weak reference; other values as they are."""
    if type(value) is tuple and any(id(item) in tensors for item in value):
        return tuple(tensors.get(id(item), item) for item in value)
    if type(value) is weakref.ref and id(value()) in tensors:
        return weakref.ref(tensors[id(value())])
    return tensors.get(id(value), value)


def _exchange(keys: dict | set, tensors: Mapping[int, Any]) -> None:
    """Exchange keys of a dict, or items of a set, in their order. tensors: the new ones by the ids of the old."""
    items = list(keys.items()) if isinstance(keys, dict) else list(keys)
    new = lambda key: tensors.get(id(key), key)
    keys.clear()
    keys.update([(new(key), value) for key, value in items] if isinstance(keys, dict) else map(new, items))
