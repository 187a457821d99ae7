"""Which entries of a batch a module takes, and which one is the target."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError

TARGETS = ("labels", "label", "target", "targets", "y")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class BatchView(dict):
    """A batch as a loss function sees it: `batch["labels"]`, and `batch[1]` for a dataset of tuples."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(str(key) if isinstance(key, int) else key)


@dataclasses.dataclass(frozen=True)
class Plan:
    """positional, named: batch entries that the module is called with. target: the entry that a loss module compares
    with, or None; where the module takes it too, it is left out when only outputs are wanted."""

    positional: tuple[str, ...]
    named: tuple[str, ...]
    target: str | None

    @classmethod
    def of(
        cls, module: torch.nn.Module, keys: Sequence[str], inputs: Sequence[str] | None, target: str | None
    ) -> "Plan":
        """keys: the batch's entries, without valid and index. Raises UserError where the two do not meet."""
        parameters = inspect.signature(module.forward).parameters
        for key in [*(inputs or ()), *([target] if target else ())]:
            if key not in keys:
                raise UserError(f"the batch has no entry {key!r}; it has {', '.join(keys)}")
        known = [key for key in keys if key in parameters and parameters[key].kind in _NAMED]
        if target is None:
            target = next((key for key in TARGETS if key in keys), None)
        if inputs is not None:
            positional, named = [key for key in inputs if key not in parameters], [k for k in inputs if k in parameters]
        elif [key for key in known if key != target]:
            positional, named = [], known
        else:
            positional, named = list(keys[:1]), [key for key in known if key not in keys[:1]]
        if target is None:
            rest = [key for key in keys if key not in positional and key not in named]
            target = rest[0] if len(rest) == 1 else None
        _check(module, parameters, positional, named, keys)
        return cls(tuple(positional), tuple(named), target)

    def call(self, module: torch.nn.Module, batch: dict[str, Any], with_target: bool = True) -> Any:
        """The module on its entries of the batch; torch tensors or arrays, a torch module or a converted one."""
        named = {key: batch[key] for key in self.named if with_target or key != self.target}
        return module(*(batch[key] for key in self.positional), **named)


def _check(module, parameters, positional, named, keys) -> None:
    free = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {p.name for p in free[: len(positional)]} | set(named)
    wanting = [p.name for p in parameters.values() if p.default is p.empty and p.kind in _NAMED and p.name not in taken]
    if wanting:
        raise UserError(
            f"{type(module).__name__}.forward needs {', '.join(wanting)}; the batch has {', '.join(keys)}. Name the "
            "Dataset's entries after the arguments, or list them in model.inputs"
        )
