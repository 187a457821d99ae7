"""Process state that captured code takes for constant and that Dynamo does not guard."""

import logging
import types
from typing import Any

from torch_bridge.capture import torch_api


class Unguarded:
    """Methods of classes, names that a Python module lacks, and levels that a logger drops, as they were at capture."""

    def __init__(self) -> None:
        self._methods: dict[type, tuple[int, dict[str, Any]]] = {}
        self._absent: dict[int, tuple[types.ModuleType, int, frozenset[str]]] = {}
        self._silent: set[tuple[logging.Logger, int]] = set()

    def note(self) -> None:
        """Add what the code that is being captured depends on. Call it while its graph is compiled."""
        for kind in torch_api.user_classes():
            methods = {name: value for name, value in vars(kind).items() if hasattr(value, "__get__")}
            self._methods[kind] = len(vars(kind)), methods
        self._silent.update(torch_api.silent_levels())
        for module, names in torch_api.absent_names():
            former = self._absent.get(id(module))
            self._absent[id(module)] = module, len(vars(module)), names | (former[2] if former else frozenset())

    def changed(self) -> bool:
        """Return True if code that was captured might do something else now, and forget all that was noted."""
        if self._methods_changed() or self._names_appeared() or self._logs():
            self._methods.clear()
            self._absent.clear()
            self._silent.clear()
            return True
        return False

    def _logs(self) -> bool:
        return any(logger.isEnabledFor(level) for logger, level in self._silent)

    def _methods_changed(self) -> bool:
        for kind, (count, methods) in self._methods.items():
            now = vars(kind)
            if len(now) != count or any(now.get(name) is not method for name, method in methods.items()):
                return True
        return False

    def _names_appeared(self) -> bool:
        for key, (module, count, names) in self._absent.items():
            if len(vars(module)) != count:
                if names & vars(module).keys():
                    return True
                self._absent[key] = module, len(vars(module)), names
        return False
