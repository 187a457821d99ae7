"""Detect changes by torch code to modules, optimizer and scheduler that a compiled run depends on, besides values."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from jaxtrain.errors import UserError
from torch_bridge import optimizers
from torch_bridge.awaited import plainly
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.state import Watch
from torch_bridge.modes import watching
from torch_bridge.torch_edits import structure_of

FREEZE = "leave optimizer= out and freeze by epochs, with freeze_until_epoch or freeze_after_epoch in optim.groups"
SCHEDULE = "give Trainer a torch lr_scheduler (scheduler=), which the run follows"
BEFORE = "do that before Trainer(...) is made"
TRAIN = "call train() on it again"
MODE, NUMBERS, VALUES = "mode", "numbers", "values"  # kinds of changes that may be allowed between two runs
NO_NUMBERS = {"params", "foreach", "fused", "capturable"}  # options that do not affect the numbers of an update


def refuse_modes_around() -> None:
    """Raise UserError inside torch.autocast, inference_mode, the meta device or modes that see every operation, which a
    compiled run would only partly follow."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise UserError(
            "torch.autocast is on around Trainer(...) or train(), and a compiled run casts by its own settings: leave "
            "it out, and set precision.policy to bf16 or fp16"
        )
    if torch.is_inference_mode_enabled():
        raise UserError(
            "torch.inference_mode is on around Trainer(...) or train(), and nothing trains in it: leave it out"
        )

    if torch.get_default_device().type == "meta":
        raise UserError(
            "torch's default device is meta around Trainer(...) or train(), where new tensors have no values: leave "
            "torch.device('meta') or set_default_device after the module is made"
        )
    if modes := watching():
        raise UserError(
            f"{modes} is on around Trainer(...) or train(), and sees torch's own operations, of which a compiled run "
            "has none: leave it out, or write the loop yourself with jaxtrain.compile, which leaves the step to torch"
        )


class Edit(NamedTuple):
    """A detected change. what: its description. advice: what to do instead, or "". kind: MODE, NUMBERS, VALUES or
    ""."""

    what: str
    advice: str = ""
    kind: str = ""


class SettingEdits:
    """Detect what has changed in these objects since the last `note`, besides the values of tensors.

    modules: the trained modules, by the prefix of their names; the first one decides the mode. optimizer: torch's, or
    any other, which is ignored. scheduler: its torch lr_scheduler, or None.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], optimizer: Any = None, scheduler: Any = None):
        self._roots = dict(modules)
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._scheduler = scheduler if self._optimizer is not None else None
        self.recorded = self.training_modes()
        self.note()

    def note(self) -> None:
        """Remember the present settings to compare with."""
        self.note_modules()
        self.note_optimizer()

    def note_modules(self) -> None:
        """Remember the present settings of the modules."""
        self._modules = _named_modules(self._roots)
        self._parts = list(self._modules.values())
        tables = ("_modules", "_parameters", "_buffers")
        self._tables = [(path, t, dict(vars(m)[t])) for t in tables for path, m in self._modules.items()]
        self._parameters = [
            (f"{path}.{key}".removeprefix("."), p)
            for path, part in self._modules.items()
            for key, p in part._parameters.items()
            if p is not None
        ]
        with plainly():
            self._structure, self._modes, self._flags = structure_of(self._parts), self._raw_modes(), self._look()

    def note_optimizer(self) -> None:
        """Remember the present settings of the optimizer and the scheduler."""
        self._held = [list(group["params"]) for group in self._groups()]
        self.options, self._state = self._options(), self._entries()
        self._plan, self._plan_reads = self._scheduled(), self._reads()

    def changed(self) -> Edit | None:
        """Return the first change found, or None."""
        return next(iter(self.all()), None)

    def all(self) -> list[Edit]:
        """Return the first change of each kind."""
        with plainly():
            looks = self._changed_tables, self._changed_structure, self._changed_flags, self._changed_mode
            return [edit for look in looks for edit in [look()] if edit is not None] + self.of_optimizer()

    def of_optimizer(self) -> list[Edit]:
        """Return the first change of each kind in the optimizer and the scheduler."""
        looks = self._changed_groups, self._changed_options, self._changed_state, self._changed_scheduler
        return [edit for look in looks for edit in [look()] if edit is not None]

    # --- modules ------------------------------------------------------------------------------------------------

    def _changed_tables(self) -> Edit | None:
        """Return a parameter, buffer or submodule that was added, replaced or removed."""
        for path, table, held in self._tables:
            now = vars(self._modules[path])[table]
            if len(now) != len(held) or any(now.get(key) is not value for key, value in held.items()):
                key = next(key for key in {**held, **now} if key not in now or held.get(key) is not now[key])
                done = "added" if key not in held else "replaced" if key in now else "removed"
                return Edit(f"{done} {path}.{key}".replace(" .", " "), BEFORE, VALUES if table == "_buffers" else "")
        return None

    def _changed_structure(self) -> Edit | None:
        now = structure_of(self._parts)
        if now == self._structure:
            return None
        entries = [*now[1], *self._structure[1]]
        entry: Any = next((e for e in entries if (e in now[1]) != (e in self._structure[1])), None)
        own = isinstance(entry, tuple) and isinstance(entry[0], int)
        path = list(self._modules)[entry[0]] if own else ""
        where = path or type(self._parts[0]).__name__
        if own and isinstance(entry[1], str):
            return Edit(f"changed the hooks of {path}.{entry[1]}".replace(" .", " "), BEFORE)
        return Edit(f"changed the forward or the hooks of {where if own else 'all modules'}", BEFORE)

    def _look(self) -> list[tuple]:
        return [(p.requires_grad, tuple(p._post_accumulate_grad_hooks or ())) for _, p in self._parameters]

    def _changed_flags(self) -> Edit | None:
        now = self._look()
        for (name, _), new, old in zip(self._parameters, now, self._flags, strict=True):
            if new[0] != old[0]:
                return Edit(f"set requires_grad of {name} to {new[0]}", FREEZE)
            if new != old:
                return Edit(f"changed the hooks of {name}", BEFORE)
        return None

    def _raw_modes(self) -> list[bool]:
        return [part.training for part in self._parts]

    def _changed_mode(self) -> Edit | None:
        now = self._raw_modes()
        modes = dict(zip(self._modules, now, strict=True))
        if now == self._modes or modes == self.recorded:
            return None
        differing = [path for path, old in zip(modes, self._modes, strict=True) if modes[path] != old]
        first = differing[0]
        word = "training" if modes[first] else "evaluation"
        whole = first in self._roots and not modes[first]
        what = f"left {first or 'the whole module'} in {word} mode"
        return Edit(what, TRAIN if whole else BEFORE, MODE)

    def training_modes(self) -> dict[str, bool]:
        """Return the mode of every submodule in a training step recorded now: see records.Record."""
        modules = _named_modules(self._roots)
        own = any(type(part).train is not torch.nn.Module.train for part in modules.values())
        before = {path: part.training for path, part in modules.items()}
        if next(iter(self._roots.values())).training and not own:
            return before
        watch = Watch(torch.nn.ModuleList(self._roots.values()))
        try:
            for root in self._roots.values():
                root.train()
            return {path: part.training for path, part in modules.items()}
        finally:
            watch.restore()
            for path, part in modules.items():
                part.training = before[path]

    # --- optimizer and scheduler --------------------------------------------------------------------------------

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _changed_groups(self) -> Edit | None:
        groups = self._groups()
        same = len(groups) == len(self._held) and all(
            len(group["params"]) == len(held) and all(p is q for p, q in zip(group["params"], held, strict=True))
            for group, held in zip(groups, self._held, strict=True)
        )
        if not same:
            return Edit("changed which parameters the optimizer holds", BEFORE)
        own = "" if self._optimizer is None else optimizers.own_step(self._optimizer)
        return Edit(f"changed the optimizer: {own}") if own else None

    def _options(self) -> list[dict[str, Any]]:
        return [
            {key: _form(group.get(key)) for key in self._optimizer.defaults.keys() - NO_NUMBERS}
            for group in self._groups()
        ]

    def _changed_options(self) -> Edit | None:
        now = self._options()
        for number, (new, old) in enumerate(zip(now, self.options, strict=False)):
            for key in new:
                if new[key] != old[key]:
                    what = f"changed {key} of the optimizer's group {number}"
                    return Edit(what, SCHEDULE if key == "lr" else "", NUMBERS)
        return None

    def _entries(self) -> list[tuple]:
        state = {} if self._optimizer is None else vars(self._optimizer)["state"]  # without fetching awaited values
        return [
            (_Same(parameter), name, _Same(value), value._version)
            if isinstance(value, torch.Tensor)
            else (_Same(parameter), name, _form(value))
            for parameter, entries in state.items()
            for name, value in entries.items()
        ]

    def _changed_state(self) -> Edit | None:
        return Edit("changed the state of the optimizer", kind=VALUES) if self._entries() != self._state else None

    def _scheduled(self) -> Any:
        return None if self._scheduler is None else _form(self._scheduler)

    def _reads(self) -> dict[str, Any]:
        """Return the plain Python values that the scheduler's functions read, by name."""
        inputs = [PythonInputs(function, {}) for function in _functions_of(self._scheduler)]
        return {p.name: value for item in inputs for p, value in zip(item.places, item.values(), strict=True)}

    def _changed_scheduler(self) -> Edit | None:
        if self._scheduler is None:
            return None
        kind = type(self._scheduler).__name__
        if self._scheduled() != self._plan:
            return Edit(f"stepped or changed the {kind}, which the run steps itself", kind=NUMBERS)
        now, held = self._reads(), self._plan_reads
        name = next((name for name in {**held, **now} if now.get(name) != held.get(name)), None)
        return None if name is None else Edit(f"changed {name}, which the {kind} reads", kind=NUMBERS)


class _Same:
    """Compare an object by identity; keep it alive, so that no other object gets its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _named_modules(roots: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return every submodule once, by its path."""
    found: dict[str, torch.nn.Module] = {}
    seen: set[torch.nn.Module] = set()
    for prefix, root in roots.items():
        found |= {f"{prefix}.{path}".strip("."): part for path, part in root.named_modules(memo=seen)}
    return found


def _form(value: Any) -> Any:
    """Return a form of a setting to compare with later: numbers and strings by value, other objects by identity."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else (_Same(value), value._version)
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_form(item) for item in value]
    if isinstance(value, dict):
        return {key: _form(item) for key, item in value.items()}
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return {key: _form(item) for key, item in vars(value).items() if key != "optimizer"}
    return value if callable(value) else _Same(value)  # a bound method is a new object at each access, but equal


def _functions_of(value: Any) -> list[Callable]:
    """Return the functions that a scheduler computes its rates with."""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        items = [item for key, item in vars(value).items() if key != "optimizer"]
        own = type(value).get_lr if not type(value).__module__.startswith("torch.") else None
        return [*([own] if own is not None else []), *_functions_of(items)]
    if isinstance(value, dict):
        return _functions_of(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _functions_of(item)]
    return [value] if hasattr(value, "__code__") else []
