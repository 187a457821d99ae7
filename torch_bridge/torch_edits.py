"""Detect changes by torch code to modules and optimizers since the last check."""

import itertools
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.nn.modules import module as of_all_modules

CHECKED_BYTES = 1 << 17  # checksummed by `some` per call
EXACT_BYTES = 1 << 26  # of constants compared in full at every call: 7 ms on a CPU
PIECE_BYTES = 1 << 20  # piece size of the other constants, which are checked in turn
BLOCKS = 64  # of a tensor on a GPU, summed separately, so that swapped values are detected
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TensorEdits:
    """Detect which tensors have other values than at the last `note`.

    In-place operations increment a tensor's version; writes through `.data` or numpy do not, and are found by
    checksums.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)
        self._turn = itertools.cycle(self.tensors)
        self._marks: dict[str, int] = {}
        self._versions: dict[str, int] = {}

    def note(self, names: Iterable[str] | None = None) -> None:
        """Remember the present values of all these tensors, or of those in `names`, to compare with."""
        names = list(self.tensors if names is None else names)
        self._marks |= zip(names, checksums([self.tensors[name] for name in names]), strict=True)
        self._versions = {name: tensor._version for name, tensor in self.tensors.items()}

    def all(self) -> list[str]:
        """Return the names of all changed tensors."""
        return self._changed(self.tensors)

    def some(self) -> list[str]:
        """Return names of changed tensors: all those whose version changed, and some found by checksum. Each call
        checksums the next few tensors, in turn."""
        names: set[str] = set()
        size = 0
        while size < CHECKED_BYTES and len(names) < len(self.tensors):
            name = next(self._turn)
            names.add(name)
            size += self.tensors[name].nbytes
        return self._changed(names)

    def _changed(self, looked_at: Collection[str]) -> list[str]:
        written = {name for name, tensor in self.tensors.items() if tensor._version != self._versions[name]}
        names = [name for name in self.tensors if name in looked_at and name not in written]
        found = zip(names, checksums([self.tensors[name] for name in names]), strict=True)
        other = written.union(name for name, mark in found if mark != self._marks[name])
        return [name for name in self.tensors if name in other]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the values: see `checksums`."""
    return checksums([tensor])[0]


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of each tensor's values. On the CPU it covers all bytes. Elsewhere it covers sums of the words
    in BLOCKS blocks, computed on the device and fetched together, as each fetch waits for the device."""
    found: dict[int, int] = {}
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        values = tensor.detach().reshape(-1).contiguous()
        if values.is_cpu:
            found[place] = zlib.crc32(values.view(torch.uint8).numpy().data)
        else:
            sums.setdefault(values.device, []).append((place, block_sums(values)))
    for pairs in sums.values():
        rows = torch.stack([row for _, row in pairs]).tolist()
        found |= {place: hash(tuple(row)) for (place, _), row in zip(pairs, rows, strict=True)}
    return [found[place] for place in range(len(tensors))]


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of words, int64 [BLOCKS + 1]: of BLOCKS equal pieces of a flat tensor, and of the remainder."""
    words = values.view(torch.int32 if values.element_size() % 4 == 0 else torch.uint8)
    length = words.numel() // BLOCKS
    blocks, rest = words[: BLOCKS * length].view(BLOCKS, length), words[BLOCKS * length :]
    return torch.cat([blocks.sum(1, dtype=torch.int64), rest.sum(dtype=torch.int64).reshape(1)])


class CapturedTensors:
    """Tensors that a record holds as constants, to detect when one has changed: by torch's version counters and, up to
    `EXACT_BYTES` in all, by their values."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Track these tensors too, with their present values."""
        new = {name: tensor for name, tensor in tensors.items() if name not in self.tensors}
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        for name, tensor in sorted(new.items(), key=lambda item: item[1].nbytes):
            self.tensors[name], self._versions[name] = tensor, tensor._version
            size += tensor.nbytes
            if size <= EXACT_BYTES:
                self._copies[name] = _words(tensor).clone()

    def changed(self) -> list[str]:
        """Return the tensors that have changed since they were added."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor._version != self._versions[name]
            or (name in self._copies and not torch.equal(_words(tensor), self._copies[name]))
        ]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values' bits as integers, so that NaN equals itself."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return values.view(_WORDS.get(values.element_size(), torch.int64))


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    words = _words(tensor)
    return words.split(PIECE_BYTES // words.element_size())


class ModuleTables:
    """Detect whether parameters, buffers or submodules of modules have been replaced since this was made."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        inner = [part for module in modules.values() for part in module.modules()]
        tables = [table for part in inner for table in (part._parameters, part._buffers, part._modules)]
        self._tables = [(table, dict(table)) for table in tables if table]
        self._empty = [table for table in tables if not table]

    def changed(self) -> bool:
        """Return True if an entry was replaced by another object, added or removed."""
        for table, held in self._tables:
            if len(table) != len(held):
                return True
            for name, value in held.items():
                if table.get(name) is not value:
                    return True
        return any(self._empty)

    def assigned(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the buffers that were replaced by others of the same shape and dtype, each with the new one, and look
        for changes since now. [] if anything else has changed."""
        pairs = []
        for table, held in self._tables:
            if table.keys() != held.keys():
                return []
            for name, value in held.items():
                new = table[name]
                if new is value:
                    continue
                if not isinstance(value, torch.Tensor) or not isinstance(new, torch.Tensor):
                    return []
                if isinstance(value, torch.nn.Parameter) or _form(value) != _form(new):
                    return []
                pairs.append((value, new))
        if any(self._empty):
            return []
        self._tables = [(table, dict(table)) for table, _ in self._tables]
        return pairs


def _form(tensor: torch.Tensor) -> tuple:
    kind = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, kind


def structure_of(modules: Sequence[torch.nn.Module]) -> tuple:
    """Return what a record depends on besides values and modes: modules, hooks, forwards of modules and classes.

    Hooks are represented by their ids, which torch never reuses.
    """
    own: list = []
    for place, module in enumerate(modules):
        tables = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        forward = vars(module).get("forward")
        if forward is not None or any(tables):
            own.append((place, forward, *(number for table in tables for number in table)))
        for name, parameter in module._parameters.items():
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
    own += [(kind, kind.forward) for kind in dict.fromkeys(map(type, modules))]
    return tuple(modules), tuple(own)


class OptimizerEdits:
    """Detect whether a torch optimizer's state was replaced or changed since the last `note`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.note()

    def note(self) -> None:
        """Remember the present state to compare with."""
        self._state = self.optimizer.state
        self._held = {parameter: dict(entries) for parameter, entries in self._state.items()}
        self._marks = self._look()

    def changed(self, values: bool) -> bool:
        """Return True if the state, or any object in it, was replaced by another object. values: also if a value was
        written in place."""
        state = self.optimizer.state
        if state is not self._state or len(state) != len(self._held):
            return True
        for parameter, held in self._held.items():
            entries = state.get(parameter, {})
            if len(entries) != len(held) or any(entries.get(name) is not value for name, value in held.items()):
                return True
        return values and self._look() != self._marks

    def place(self, parameter: torch.Tensor, name: str) -> dict:
        """Return the dict that holds this entry of the parameter's state as last noted: the optimizer's, or what was
        taken out of it."""
        now, held = self.optimizer.state.get(parameter, {}), self._held.get(parameter, {})
        return self.optimizer.state[parameter] if now.get(name) is held.get(name) else held

    def _look(self) -> list:
        parts = (value for entries in self._held.values() for value in entries.values())
        return [value._version if isinstance(value, torch.Tensor) else value for value in parts]
