"""Changes that torch code has made to modules and optimizers since they were last looked at."""

import itertools
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.nn.modules import module as of_all_modules

CHECKED_BYTES = 1 << 17  # that `some` looks at in a call
EXACT_BYTES = 1 << 26  # of constants that are compared whole at every call: 7 ms of a CPU
PIECE_BYTES = 1 << 20  # of larger ones, looked at in turn
BLOCKS = 64  # of a tensor on a GPU, summed apart, so that values that change places are seen
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


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
        names = list(self.tensors if names is None else names)
        self._marks |= zip(names, checksums([self.tensors[name] for name in names]), strict=True)
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
        written = {name for name, tensor in self.tensors.items() if tensor._version != self._versions[name]}
        names = [name for name in self.tensors if name in looked_at and name not in written]
        found = zip(names, checksums([self.tensors[name] for name in names]), strict=True)
        other = written.union(name for name, mark in found if mark != self._marks[name])
        return [name for name in self.tensors if name in other]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the values: see `checksums`."""
    return checksums([tensor])[0]


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of each tensor's values: of all bytes on the CPU; elsewhere of the sums of its words in
    BLOCKS, which are computed there and fetched together, as each fetch waits for the device."""
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
    """Return the sums, int64 [BLOCKS + 1], of the words of so many pieces of a flat tensor, and of what is left."""
    words = values.view(torch.int32 if values.element_size() % 4 == 0 else torch.uint8)
    length = words.numel() // BLOCKS
    blocks, rest = words[: BLOCKS * length].view(BLOCKS, length), words[BLOCKS * length :]
    return torch.cat([blocks.sum(1, dtype=torch.int64), rest.sum(dtype=torch.int64).reshape(1)])


class CapturedTensors:
    """Tells which of the tensors that a record holds as constants have changed.

    Up to EXACT_BYTES of them are compared with copies at every call, the smallest first. Of the rest, in-place
    operations are seen by the version, writes through `.data` or numpy by checksums of pieces in turn.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._pieces: dict[tuple[str, int], int] = {}  # (name, number) -> checksum
        self._looked: dict[tuple[str, int], int] = {}  # the call at whose begin it was looked at last
        self._waiting: list[tuple[str, int]] = []
        self._calls = self._size = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold these too, with their present values, in the call that runs."""
        new = {name: tensor for name, tensor in tensors.items() if name not in self.tensors}
        for name, tensor in sorted(new.items(), key=lambda item: item[1].nbytes):
            self.tensors[name], self._versions[name] = tensor, tensor._version
            self._size += tensor.nbytes
            if self._size <= EXACT_BYTES:
                self._copies[name] = _words(tensor).clone()
            else:
                pieces = {(name, n): checksum(piece) for n, piece in enumerate(_split(tensor))}
                self._pieces |= pieces
                self._looked |= dict.fromkeys(pieces, self._calls)

    def changed(self) -> list[str]:
        """Begin a call; the tensors that are known to have changed since the last one began."""
        self._calls += 1
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor._version != self._versions[name]
            or (name in self._copies and not torch.equal(_words(tensor), self._copies[name]))
        ]

    def changed_unseen(self, ended: bool = False) -> tuple[int, int] | None:
        """Look at a piece of the large tensors: where it has changed, the first and the last call, counted from 1, that
        may have computed with its old values; the last is before the first where none has.

        ended: all calls until now have been made; look at all pieces.
        """
        if not self._waiting or ended:
            self._waiting = list(self._pieces)
        looked_at = self._waiting if ended else self._waiting[:1]
        self._waiting = self._waiting[len(looked_at) :]
        for piece in looked_at:
            name, number = piece
            if checksum(_split(self.tensors[name])[number]) != self._pieces[piece]:
                return self._looked[piece] + 1, self._calls if ended else self._calls - 1
            self._looked[piece] = self._calls
        return None


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The values' bits as integers, so that NaN equals itself."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return values.view(_WORDS.get(values.element_size(), torch.int64))


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    words = _words(tensor)
    return words.split(PIECE_BYTES // words.element_size())


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
    """Return what a record takes as it is, beside values and modes: modules, hooks, forwards of modules and classes.

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
    own += [(kind, kind.forward) for kind in dict.fromkeys(map(type, modules))]
    return tuple(modules), tuple(own)


class OptimizerEdits:
    """Tells if the state of a torch optimizer was replaced or changed since the last `note`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.note()

    def note(self) -> None:
        """Take the present state for the one to compare with."""
        self._state = self.optimizer.state
        self._held = {parameter: dict(entries) for parameter, entries in self._state.items()}
        self._marks = self._look()

    def changed(self, values: bool) -> bool:
        """Return True where the state, an entry of it or a part of an entry is another object. values: or was written
        to."""
        state = self.optimizer.state
        if state is not self._state or len(state) != len(self._held):
            return True
        for parameter, held in self._held.items():
            entries = state.get(parameter, {})
            if len(entries) != len(held) or any(entries.get(name) is not value for name, value in held.items()):
                return True
        return values and self._look() != self._marks

    def untouched(self, parameter: torch.Tensor, name: str) -> bool:
        """Return True where this part of the parameter's entry is the object that it was."""
        now, held = self.optimizer.state.get(parameter, {}), self._held.get(parameter, {})
        return now.get(name) is held.get(name)

    def _look(self) -> list:
        parts = (value for entries in self._held.values() for value in entries.values())
        return [value._version if isinstance(value, torch.Tensor) else value for value in parts]
