"""Tensors that a call leaves in Python, as results of its record: `self.aux_loss = ...`, a hook's list of features."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_bridge.lazy_scalar import LazyScalar
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.places import Place, value_at
from torch_bridge.lowering.python.state import OF_EVERY_MODULE, computed_anew
from torch_bridge.lowering.recording.shown_types import is_number
from torch_bridge.lowering.structure import WithLeft

_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class _Left:
    """A place that a call sets: an entry of a dict, or a whole list (key None).

    container: returns the dict or list. spec: the structure of the value's tensors. before: the tensors it had.
    inputs: what the code reads, perhaps this place too.
    """

    name: str
    container: Callable[[], Any]
    key: Any
    spec: Any
    dtypes: list[torch.dtype]
    before: list[torch.Tensor]
    inputs: PythonInputs

    def set(self, tensors: list) -> None:
        pairs = zip(tensors, self.dtypes, strict=True)
        kinds = [tensor if tensor.dtype == kind else tensor.to(kind) for tensor, kind in pairs]  # to() would wait
        value, container = pytree.tree_unflatten(kinds, self.spec), self.container()
        old = None if self.key is None else container.get(self.key)
        container[slice(None) if self.key is None else self.key] = value
        if type(old) in (list, tuple, dict) and type(old) is type(value):
            leaves, spec = pytree.tree_flatten(old)
            if spec == self.spec and all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                self.inputs.follow(old, value)


class LeftTensors:
    """Places that the calls of a record set to new tensors. Its length is the number of tensors."""

    def __init__(self, places: Sequence[_Left]):
        self._places = places

    def __len__(self) -> int:
        return sum(len(left.dtypes) for left in self._places)

    def read(self, captured: Mapping[int, torch.Tensor]) -> list[str]:
        """Return the names of the places whose tensors of before the record reads, and let go of these tensors.

        captured: the tensors that the record holds, by their ids.
        """
        real = lambda tensor: tensor.tensor() if isinstance(tensor, LazyScalar) else tensor
        names = [left.name for left in self._places if any(id(real(tensor)) in captured for tensor in left.before)]
        for left in self._places:
            left.before.clear()
        return names

    def leave(self, tensors: Sequence[Any]) -> None:
        """Set the places to a call's results."""
        feed = iter(tensors)
        for left in self._places:
            left.set([next(feed) for _ in left.dtypes])


class LeftInCall:
    """Find the places that a call sets to new tensors, alone or in lists, tuples and dicts, while it is recorded.

    They are attributes of modules and objects, and items of dicts and lists that the code reaches by a name. Whatever
    else a call changes is left to the search for changes. found: the last call's.
    """

    found = LeftTensors(())

    def __deepcopy__(self, memo: Any) -> "LeftInCall":
        return LeftInCall()

    def look(self, module: torch.nn.Module, inputs: PythonInputs) -> None:
        """Note what the places hold before the call. module: holds every module of the record."""
        self._inputs = inputs
        self._dicts: list[tuple[str, int, Callable, dict, set]] = []
        self._lists: list[tuple[str, int, Callable, list]] = []
        of_modules = set()
        for path, inner in module.named_modules():
            of_modules.add(id(vars(inner)))
            computed = {name for name in vars(inner) if name in OF_EVERY_MODULE or computed_anew(inner, name)}
            self._add(path.removeprefix("wrapped_module").removeprefix("."), vars(inner), computed)
        for name, attributes in inputs.attributes():
            if id(attributes) not in of_modules:
                self._add(name, attributes)
        for place in inputs.containers():
            held, where = value_at(place), functools.partial(value_at, place)
            if type(held) is dict:
                self._dicts.append((place.name, _id_of(place), where, dict(held), set()))
            elif type(held) is list:
                self._lists.append((place.name, _id_of(place), where, list(held)))
        before = [items for *_, items, _ in self._dicts], [items for *_, items in self._lists]
        known = (*module.parameters(), *module.buffers(), *pytree.tree_leaves(before))
        self._known = {id(tensor): tensor for tensor in known if isinstance(tensor, torch.Tensor)}

    def _add(self, name: str, attributes: dict, computed: Iterable[str] = ()) -> None:
        self._dicts.append((name, id(attributes), lambda: attributes, dict(attributes), set(computed)))

    def take(self, outputs: Any) -> Any:
        """Undo what the call has set; return its outputs, with the tensors if it has left any."""
        self._places: list[_Left] = []
        self._numbers: list[int] = []
        tensors: list[torch.Tensor] = []
        for name, number, container, before, computed in self._dicts:
            held = container()
            for key, value in [*held.items()]:
                old = before.get(key, _NOTHING)
                new = value is not old and key not in computed
                if new and self._note(f"{name}.{key}", number, container, key, old, value, tensors):
                    if old is _NOTHING:
                        del held[key]
                    else:
                        held[key] = old
        for name, number, container, before in self._lists:
            held = container()
            changed = len(held) != len(before) or any(now is not was for now, was in zip(held, before, strict=True))
            if changed and self._note(name, number, container, None, before, list(held), tensors):
                held[:] = before
        self.found = LeftTensors(self._places)
        self._dicts, self._lists, self._known = [], [], {}
        return WithLeft(outputs, tensors, tuple(self._numbers)) if tensors else outputs

    def _note(self, name: str, number: int, container: Callable, key: Any, old: Any, value: Any, tensors: list) -> bool:
        """Note a place if its value is made of new tensors, none of which stands for a number."""
        leaves, spec = pytree.tree_flatten(value)
        new = (isinstance(leaf, torch.Tensor) and not (id(leaf) in self._known or is_number(leaf)) for leaf in leaves)
        if not leaves or not all(new):
            return False
        before = [leaf for leaf in pytree.tree_leaves(old) if isinstance(leaf, torch.Tensor)]
        dtypes = [leaf.dtype for leaf in leaves]
        self._places.append(_Left(name.removeprefix("."), container, key, spec, dtypes, before, self._inputs))
        self._numbers += [number, hash(name)]
        tensors += leaves
        return True


def _id_of(place: Place) -> int:
    """Return what stays the same while a place does: the dict that holds it, or the variable of a function."""
    return id(getattr(place.container, "cell", place.container))
