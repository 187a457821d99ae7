"""accelerate's Accelerator with compiled models: `from jaxtrain.accelerate import Accelerator`.

The user's loop stays as it is, on accelerate's own code. A model that `prepare` returns runs forward and backward as
XLA programs inside torch's autograd graph; losses, `backward`, clipping, optimizers, schedulers, checkpoints and
trackers remain torch's and accelerate's. Every other public name is accelerate's own.
"""

import functools
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate import DistributedType

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
    DistributedType.DEEPSPEED: "DeepSpeed shards and steps the model itself",
    DistributedType.FSDP: "FSDP takes the parameters apart that the compiled model reads",
    DistributedType.MEGATRON_LM: "Megatron-LM has models of its own",
}


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator whose prepared models are compiled. Arguments, methods and files are accelerate's own.

    The model is captured as `torch.compile` captures it, in several programs if it has to be. Raises UserError for
    DeepSpeed, FSDP, Megatron-LM and fp16.
    """

    @signature_of(accelerate.Accelerator.__init__)
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
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
        compile_calls([inner])
        return super().prepare_model(model, *arguments, **options)
