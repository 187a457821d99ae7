"""accelerate's Accelerator with compiled models: `from jaxtrain.accelerate import Accelerator`.

The user's loop stays as it is, on accelerate's own code. A model that `prepare` returns runs forward and backward as
XLA programs inside torch's autograd graph; losses, `backward`, clipping, optimizers, schedulers, checkpoints and
trackers remain torch's and accelerate's. Under a FullyShardedDataParallelPlugin or a DeepSpeedPlugin, of the script's
or of `accelerate launch`, one process drives all devices: weights, gradients and moments are split over them, and
updates are compiled too. Every other public name is accelerate's own.
"""

import functools
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate import DistributedType
from accelerate.optimizer import AcceleratedOptimizer

from jaxtrain import drop_in_sharding
from jaxtrain.compiled_step.in_parts import StepInParts
from jaxtrain.errors import UserError
from jaxtrain.lazy import library_names, signature_of
from jaxtrain.runtime import host_memory
from torch_bridge.capture.module_call import compile_calls
from torch_bridge.from_torch import unwrapped

if TYPE_CHECKING:
    from accelerate import *  # noqa: F403  # pyright: ignore[reportAssignmentType]
else:
    __getattr__, __dir__ = library_names(__name__, "accelerate")

REFUSED = {
    DistributedType.MEGATRON_LM: "Megatron-LM has models of its own",
}


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator whose prepared models are compiled. Arguments, methods and files are accelerate's own.

    The model is captured as `torch.compile` captures it, in several programs if it has to be. Raises UserError for
    Megatron-LM, fp16, and what has no counterpart in the plugins of FSDP and DeepSpeed.
    """

    _sharded: StepInParts | None = None

    @signature_of(accelerate.Accelerator.__init__)
    def __init__(self, *arguments: Any, **options: Any):
        self._shard, options = drop_in_sharding.of_accelerate(options)
        with drop_in_sharding.without_plugins():
            super().__init__(*arguments, **options)
        if self._shard != "ddp" and self.num_processes > 1:
            raise UserError(f"FSDP: {self.num_processes} processes, and one drives all devices here: start it alone")
        reason = REFUSED.get(self.distributed_type)
        if reason is not None:
            raise UserError(f"{self.distributed_type}: {reason}; jaxtrain.Trainer shards with shard.strategy=fsdp")
        if self.mixed_precision in ("fp16", "fp8"):
            raise UserError(f"mixed_precision={self.mixed_precision!r}: its scales are torch's; use 'bf16' or 'no'")

        for name in ("dynamo_backend", "dynamo_plugin", "parallelism_config", "torch_tp_plugin"):
            if options.get(name) not in (None, "no", "NO", accelerate.utils.DynamoBackend.NO):
                raise UserError(f"{name}: the model is compiled whole by XLA; leave it out")

    def lomo_backward(self, *arguments: Any, **options: Any) -> None:
        raise UserError("lomo_backward updates inside torch's backward pass, which is compiled; use another optimizer")

    @signature_of(accelerate.Accelerator.prepare_model)
    def prepare_model(self, model: torch.nn.Module, *arguments: Any, **options: Any) -> torch.nn.Module:
        """Compile the model's forward and backward pass, then prepare it as accelerate does."""
        host_memory.keep()
        inner = unwrapped(model)
        if isinstance(model, torch._dynamo.OptimizedModule):
            model.forward = functools.partial(inner)  # replaces dynamo's compiled forward
        inner._compiled_call_impl = None  # set by inner.compile(); it would run another backend's version
        if self._shard == "ddp":
            compile_calls([inner])
            return super().prepare_model(model, *arguments, **options)
        if self._sharded is not None:
            raise UserError("FSDP: a second model is prepared, wanted one, as FSDP and DeepSpeed of accelerate's take")
        options["evaluation_mode"] = True  # under a launcher, accelerate would wrap it for several processes
        model = super().prepare_model(model, *arguments[:1], **options)  # first, as it may move the weights to a device
        self._sharded = StepInParts({"model": inner}, self._shard)
        self.print(self._sharded.weights.described())
        return model

    @signature_of(accelerate.Accelerator.prepare_optimizer)
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        """Prepare the optimizer as accelerate does; under FSDP, its updates are compiled."""
        prepared = super().prepare_optimizer(optimizer, *arguments, **options)
        if self._shard != "ddp" and type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = _ShardedOptimizer
            prepared.accelerator = self
        return prepared

    @signature_of(accelerate.Accelerator.free_memory)
    def free_memory(self, *objects: Any) -> Any:
        """Forget the prepared objects, as accelerate does; under FSDP, another model can then be prepared."""
        if self._sharded is not None:
            self._sharded.weights.sync()
            self._sharded = None
        return super().free_memory(*objects)


class _ShardedOptimizer(AcceleratedOptimizer):
    """An optimizer whose step() runs compiled, on the weights and gradients that are split over the devices."""

    accelerator: Accelerator

    def step(self, closure: Any = None) -> None:
        """Update the weights, unless gradients are accumulated."""
        sharded = self.accelerator._sharded
        if closure is not None or sharded is None or not self.gradient_state.sync_gradients:
            super().step(closure)
        elif not sharded.update(self.optimizer):
            super().step()
