"""Watch a plain torch script's first updates: what it calls, from which lines, and what those lines read."""

import contextlib
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from jaxtrain.errors import UserError
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel

_ROOT = Path(__file__).parents[1]
_NOT_THE_USERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(_ROOT / "jaxtrain"), str(_ROOT / "torch_bridge"), "<",
)  # fmt: skip


class Line(NamedTuple):
    """A line of the user's that is being run. values: its names' values then (of a call; {} of an update)."""

    frame: FrameType
    number: int
    values: dict[str, Any]


class Called(NamedTuple):
    """A call of an outermost module that learns. lines: the user's, innermost first."""

    module: torch.nn.Module
    args: tuple
    kwargs: dict[str, Any]
    lines: list[Line]


class Update(NamedTuple):
    """An update by a torch optimizer. calls: of modules, since its update before. seconds: since then."""

    optimizer: torch.optim.Optimizer
    calls: list[Called]
    lines: list[Line]
    seconds: float


class Watch:
    """Watches a script until it is stopped. libraries: packages with trainers. library: the one whose trainer runs
    the loop, "" for a loop of its own. optimizers: those that have made updates."""

    def __init__(self, libraries: Iterable[str]) -> None:
        self._libraries = frozenset(libraries)
        self.updates: list[Update] = []
        self.library = ""
        self._calls: list[Called] = []
        self._since: dict[int, tuple[int, float]] = {}  # optimizer -> calls so far, time
        self._depth = 0
        self._hooks: list[Any] = []

    @contextlib.contextmanager
    def watching(self, after_update: Callable[[int], None]) -> Iterator[None]:
        """Watch inside the context. after_update: called with the largest number of updates of any optimizer."""

        def enter(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
            learns = any(p.requires_grad for p in module.parameters())
            if not self._depth and learns and torch.is_grad_enabled():
                self._calls.append(Called(module, args, {}, _users_lines(sys._getframe(1), values=True)))
            self._depth += 1

        def leave(module: torch.nn.Module, args: tuple, output: Any) -> None:
            self._depth -= 1

        def updated(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            first, began = self._since.get(id(optimizer), (0, 0.0))
            now = time.perf_counter()
            self.library = self.library or self._library_of(sys._getframe(1))
            lines = _users_lines(sys._getframe(1), values=False)
            self.updates.append(Update(optimizer, self._calls[first:], lines, now - began if began else 0.0))
            self._since[id(optimizer)] = len(self._calls), now
            after_update(max(len(self.of(each)) for each in self.optimizers))

        self._hooks = [
            register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True),
        ]  # fmt: skip
        steps = register_optimizer_step_post_hook(updated)
        try:
            yield
        finally:
            steps.remove()
            self.stop_looking()

    def stop_looking(self) -> None:
        """Take the hooks away from modules: under them, a compiled module would run in torch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._depth = [], 0

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list({id(update.optimizer): update.optimizer for update in self.updates}.values())

    def of(self, optimizer: torch.optim.Optimizer) -> list[Update]:
        """Return an optimizer's updates."""
        return [update for update in self.updates if update.optimizer is optimizer]

    def _library_of(self, frame: FrameType | None) -> str:
        """Return the library whose trainer runs a frame, by the outermost call; "" if none does."""
        outermost = ""
        while frame is not None:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            outermost = package if package in self._libraries else outermost
            frame = frame.f_back
        return outermost

    def conversions(self) -> list[dict[str, Any]]:
        """Return, for every module, whether it is one program and, if not, why, with the lines of its code."""
        found = []
        for called in {id(each.module): each for each in reversed(self._calls)}.values():
            module = called.module
            row = {"module": type(module).__name__, "parameters": sum(p.numel() for p in module.parameters())}
            try:
                from_torch(module, called.args)
                found.append({**row, "one_program": True, "why": ""})
            except (UnsupportedModel, UserError, TypeError) as error:
                found.append({**row, "one_program": False, "why": str(error)})
        return found


def _users_lines(frame: FrameType | None, values: bool) -> list[Line]:
    lines = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            lines.append(Line(frame, frame.f_lineno, dict(frame.f_locals) if values else {}))
        frame = frame.f_back
    return lines
