"""Keep a user's torch module readable while a run trains its weights on the devices."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.train.user.settings import CompiledSettings


class ModuleReads:
    """Guard of a module during a run: writes the weights into it once a callback reads them, and refuses changes.

    module: a torch module. loss: if it is a module too, its tensors are included. write_back: writes the weights into
    the tensors. state: returns the run's state. optimizer: a torch optimizer whose state is written back too.
    scheduler: of the optimizer.
    """

    def __init__(
        self,
        module: Any,
        loss: Any,
        write_back: Callable[[], None],
        state: Callable[[], Any],
        optimizer: Any = None,
        scheduler: Any = None,
    ):
        from torch_bridge.awaited import Awaited
        from torch_bridge.awaited_state import AwaitedState
        from torch_bridge.torch_edits import TensorEdits

        self.settings = CompiledSettings(module, loss, optimizer, scheduler)
        parts = {"": module} | ({"loss.": loss} if hasattr(loss, "named_parameters") else {})
        named = {at + name: t for at, part in parts.items() for name, t in part.named_parameters()}
        named |= {at + name: t for at, part in parts.items() for name, t in part.named_buffers()}
        first = {id(tensor): name for name, tensor in reversed(named.items())}  # a loss may hold the module
        self._tensors = {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}
        self._awaited = [Awaited(self._tensors.values(), self._fetch)]
        self._awaited += [AwaitedState(optimizer, self._fetch)] if hasattr(optimizer, "param_groups") else []
        self._edits, self._write_back, self._state, self._optimizer = TensorEdits, write_back, state, optimizer
        self._held = self._active = False
        self._read: Any = None  # edits since the weights were read
        self._thread = 0

    @contextlib.contextmanager
    def during_training(self) -> Iterator[None]:
        """Return the context of a run, in which callbacks may read the module and the optimizer."""
        hook = getattr(self._optimizer, "register_state_dict_pre_hook", None)
        handle = hook(lambda _: self._fetch()) if hook is not None else None
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self.release()
            if handle is not None:
                handle.remove()

    def hold(self) -> None:
        """Start watching the tensors for reads, before a callback."""
        if self._active and not self._held:
            self._thread, self._read, self._held = threading.get_ident(), None, True
            for awaited in self._awaited:
                awaited.hold()

    def release(self) -> None:
        """Stop watching the tensors for reads."""
        if self._held:
            self._held = False
            for awaited in self._awaited:
                awaited.release()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Return the context of the trainer's own writes, which do not count as changes by a callback."""
        self.release()
        changed = self._read is not None and bool(self._read.all())
        with self.settings.writing():
            yield
        if self._read is not None and not changed:
            self._read.note()

    def check(self, reader: str) -> None:
        """Raise UserError if the callback `reader` has changed tensors or settings that it may only read."""
        changed = self._read.all() if self._read is not None else []
        if changed:
            raise UserError(
                f"callback {reader} changed {changed[0]} in the torch module, but a run trains its own copy on the "
                "devices: change weights in your own loop (jaxtrain.compile, docs/own_loop.md)"
            )
        self.settings.check(reader)

    def _fetch(self) -> None:
        if not self._held:
            return
        if threading.get_ident() != self._thread:
            raise UserError(
                "a thread beside the run, as the one that reads data, reads the module that is trained: give it a copy"
            )
        leaves = jax.tree.leaves(self._state().params)
        if not all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in leaves):
            raise UserError(
                "the weights are spread over several processes: call trainer.write_back() in each of them before the "
                "module or the optimizer is read"
            )
        self.release()
        self._write_back()
        self._read = self._edits(self._tensors)
        self._read.note()
