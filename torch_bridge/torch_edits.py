"""Changes that torch code has made to modules and optimizers since they were last looked at."""

import itertools
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.nn.modules import module as of_all_modules

CHECKED_BYTES = 1 << 17  # that `some` looks at in a call


class TensorEdits:
    """Tells which of these tensors have other values than at the last `note`.

    In-place operations count a tensor's version up; writes through `.data` or numpy do not, and are found by checksums.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)
        self._turn = itertools.cycle(self.tensors)
        self._marks: dict[str, int] = {}
        self._versions: dict[str, int] = {}

    def note(self, names: Iterable[str] | None = None) -> None:
        """Take the present values of all of these tensors, or of those of these names, for the ones to compare with."""
        for name in self.tensors if names is None else names:
            self._marks[name] = checksum(self.tensors[name])
        self._versions = {name: tensor._version for name, tensor in self.tensors.items()}

    def all(self) -> list[str]:
        """The tensors that have changed."""
        return self._changed(self.tensors)

    def some(self) -> list[str]:
        """The tensors that have changed by their version, or whose turn it is that their values are looked at."""
        names: set[str] = set()
        size = 0
        while size < CHECKED_BYTES and len(names) < len(self.tensors):
            name = next(self._turn)
            names.add(name)
            size += self.tensors[name].nbytes
        return self._changed(names)

    def _changed(self, looked_at: Collection[str]) -> list[str]:
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor._version != self._versions[name] or (name in looked_at and checksum(tensor) != self._marks[name])
        ]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the values: of all bytes on the CPU, the sum of their words elsewhere."""
    values = tensor.detach().reshape(-1)
    if values.is_cpu:
        return zlib.crc32(values.view(torch.uint8).numpy().data)
    words = torch.int32 if values.element_size() % 4 == 0 else torch.uint8
    return int(values.view(words).sum(dtype=torch.int64))


class ModuleTables:
    """Tells if a module has other parameters, buffers or submodules than when this was made: other objects."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        inner = [part for module in modules.values() for part in module.modules()]
        tables = [table for part in inner for table in (part._parameters, part._buffers, part._modules)]
        self._tables = [(table, dict(table)) for table in tables if table]
        self._empty = [table for table in tables if not table]

    def changed(self) -> bool:
        """Return True where an entry is another object than before, was added or has gone."""
        for table, held in self._tables:
            if len(table) != len(held):
                return True
            for name, value in held.items():
                if table.get(name) is not value:
                    return True
        return any(self._empty)


def structure_of(modules: Sequence[torch.nn.Module], parameter_hooks: bool = True) -> tuple:
    """Return what a record takes as it is, beside values and modes: these modules, hooks, forwards set on a module.

    Hooks stand there by their numbers, which torch gives out once. parameter_hooks: those of parameters too.
    """
    own: list = []
    for place, module in enumerate(modules):
        tables = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        forward = vars(module).get("forward")
        if forward is not None or any(tables):
            own.append((place, forward, *(number for table in tables for number in table)))
        for name, parameter in module._parameters.items() if parameter_hooks else ():
            hooks = None if parameter is None else parameter._backward_hooks
            if hooks:
                own.append((place, name, *hooks))
    for table in (
        of_all_modules._global_forward_hooks,
        of_all_modules._global_forward_pre_hooks,
        of_all_modules._global_backward_hooks,
        of_all_modules._global_backward_pre_hooks,
    ):
        own += table
    return tuple(modules), tuple(own)


class OptimizerEdits:
    """Tells if the state of a torch optimizer was replaced or changed since the last `note`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.note()

    def note(self) -> None:
        """Take the present state for the one to compare with."""
        self._state, self._size, self._marks = self.optimizer.state, len(self.optimizer.state), self._look()

    def changed(self, values: bool) -> bool:
        """Return True where another state was loaded, or the state reset. values: look at every entry too."""
        state = self.optimizer.state
        if state is not self._state or len(state) != self._size:
            return True
        return values and self._look() != self._marks

    def _look(self) -> list:
        return [
            (id(key), name, id(value), value._version if isinstance(value, torch.Tensor) else value)
            for key, entries in self.optimizer.state.items()
            for name, value in entries.items()
        ]
