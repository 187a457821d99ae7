"""Several updates over shared weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.compiled_step.step import CompiledStep

if TYPE_CHECKING:
    from torch_bridge.evaluated_module import EvaluatedModule


class CompiledSteps:
    """Several updates over shared weights; made by `compile_many`."""

    def __init__(self, steps: Mapping[str, CompiledStep]):
        self.steps = dict(steps)

    def __getitem__(self, name: str) -> CompiledStep:
        return self.steps[name]

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Run all updates in order on one batch; return the losses by name."""
        return {name: step(batch) for name, step in self.steps.items()}

    def sync(self) -> None:
        """Write all weights and optimizer states back into the torch objects."""
        for step in self.steps.values():
            step.sync()

    def eval(self, name: str) -> "EvaluatedModule":
        """Return one module in evaluation mode, with a compiled forward pass; see CompiledStep.eval."""
        return next(iter(self.steps.values())).eval(name)
