"""A torch module, its loss and an example batch, ready to be trained in JAX."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.from_torch import ConvertedModule, Forward, Record, state_of, unwrapped
from torch_bridge.lowering import UnsupportedModel
from torch_bridge.training.batch_plan import Plan
from torch_bridge.training.loss_entry import LossEntry, check_loss, main_output, takes_target


class TorchTask:
    """The module, its recorded forward pass and its recorded loss.

    loss: a torch loss module, a torch function of (output, batch), or None for the model's own. example_batch: the
    dataset's entries of one collated batch in numpy; its batch size does not matter. inputs: batch entries that the
    module takes, in order, found by name where left out. target: the entry that a loss module compares with.
    Raises UserError that lists everything that cannot be converted, with the lines of the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable | None,
        example_batch: Mapping[str, Any],
        inputs: list[str] | None = None,
        target: str | None = None,
    ):
        module = unwrapped(module)
        self.module = module
        example = dict(example_batch)
        self.plan = Plan.of(module, list(example), inputs, target)
        check_loss(loss)
        if loss is not None and takes_target(loss) and self.plan.target is None:
            raise UserError(
                f"the loss compares an output with a target; which entry of the batch is it? It has "
                f"{', '.join(example)}. Set loss.target_key"
            )
        self.entries = tuple(example)
        self.criterion = loss
        self.forward_record = Record(Forward(module))
        self.loss_record = Record(LossEntry(module, loss, self.plan))
        self.trained = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        for training in (False, True):
            self.record(example, training)

    def record(self, batch: Mapping[str, Any], training: bool) -> None:
        """Record the loss of such a batch, where no record holds for its sizes yet. Raises UserError as the class."""
        entries = {key: batch[key] for key in self.entries}
        try:
            self.loss_record.graph((entries,), training)
        except UnsupportedModel as error:
            raise UserError(str(error)) from error

    def build(self) -> ConvertedModule:
        """The flax module with empty parameters, `weights` fills them; buffers outside the state dict have theirs."""
        model = ConvertedModule(self.forward_record, self.module, self.loss_record.changed(), empty=True)
        model.definition = self
        return model

    def weights(self) -> dict[str, np.ndarray]:
        """The torch module's state dict."""
        return state_of(self.module)

    def trainable(self, key: str) -> bool:
        return self.trained.get(key, True)

    def loss(self, model: ConvertedModule, batch: Mapping[str, Any], rngs: Callable | None) -> dict[str, Any]:
        """As LossEntry gives it; rngs=None: evaluation mode."""
        entries = {key: batch[key] for key in self.entries}
        return self.loss_record.run(model, (entries,), rngs)

    def outputs(self, model: ConvertedModule, batch: Mapping[str, Any]) -> Any:
        """Evaluation outputs, those with one row per sample, by name where there are several."""
        return _per_sample(self.plan.call(model, dict(batch), with_target=False), self._rows(batch))

    def call(self, module: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        """As `outputs`, by the torch module."""
        with torch.no_grad():
            return _per_sample(self.plan.call(module, dict(batch), with_target=False), self._rows(batch))

    def torch_loss(self, module: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """As `loss`, by the torch module."""
        wide = {key: value.long() if value.dtype == torch.int32 else value for key, value in batch.items()}
        entries = {key: wide[key] for key in self.entries}
        return LossEntry(module, self.criterion, self.plan)(entries)["value"]

    def eval_sums(self, outputs: Any, batch: Mapping[str, Any], valid: Any) -> dict[str, Any]:
        """Count correct and seen rows, for an output [batch, class] and a target int [batch]. valid: bool [batch]."""
        logits = main_output(outputs)
        target = batch.get(self.plan.target) if self.plan.target else None
        if logits.ndim != 2 or target is None or target.ndim != 1 or not jnp.issubdtype(target.dtype, jnp.integer):
            return {}
        correct = (jnp.argmax(logits, -1) == target) & valid
        return {"correct": jnp.sum(correct), "seen": jnp.sum(valid)}

    def _rows(self, batch: Mapping[str, Any]) -> int:
        return pytree.tree_leaves({key: batch[key] for key in self.entries})[0].shape[0]

    @staticmethod
    def metrics(sums: Mapping[str, Any]) -> dict[str, float]:
        """Accuracy from the sums of a whole split."""
        if "seen" not in sums:
            return {}
        return {"accuracy": float(sums["correct"]) / max(float(sums["seen"]), 1.0)}

    @property
    def couples_samples(self) -> bool:
        """True where a sample's loss depends on the others of its batch for sure: batch statistics."""
        return any(isinstance(inner, torch.nn.modules.batchnorm._BatchNorm) for inner in self.module.modules())

    def copy(self) -> torch.nn.Module:
        """The torch module once more, with its own weights."""
        twin = copy.deepcopy(self.module)
        twin.definition = self
        return twin


def _per_sample(outputs: Any, batch: int) -> Any:
    """One tensor, or a dict of those whose first axis is the sample."""
    if isinstance(outputs, dict) or hasattr(outputs, "items"):
        named = dict(outputs.items())
    elif isinstance(outputs, (tuple, list)):
        named = {str(index): value for index, value in enumerate(outputs)}
    else:
        return outputs
    return {k: v for k, v in named.items() if hasattr(v, "shape") and len(v.shape) and v.shape[0] == batch}
