"""The torch twin of a compared system in a plain torch loop."""

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

BATCHES = 8  # different ones, in turn


class TorchSide:
    """The twin in a plain torch loop: autocast, fused AdamW, clipping, DistributedDataParallel between processes."""

    def __init__(self, trainer, training: bool, feed: Any = None):
        import jax
        import torch

        from jaxtrain.task import trains
        from torch_bridge.datasets import to_torch

        self.task, self.config = trainer.task, trainer.config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        twin = self.task.twin.build(self.config)
        twin.load_state_dict({key: to_torch(value) for key, value in trainer.state_dict().items()}, strict=True)
        self.module = twin.to(self.device).train(training)
        for key, parameter in self.module.named_parameters():
            parameter.requires_grad_(bool(trains(self.task, key, self.config)))
        self.optimizer = torch.optim.AdamW(self._groups(), fused=True, betas=self._betas(), eps=self.config.optim.eps)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        compute = wrapped(self.module, self.task.twin.loss, self.config)
        if torch.distributed.is_initialized():
            unused = any(not p.requires_grad for p in self.module.parameters())
            compute = torch.nn.parallel.DistributedDataParallel(compute, find_unused_parameters=unused)
        self.compute = compute
        cast = self.config.precision.policy == "bf16"
        autocast = lambda: torch.autocast(self.device.type, torch.bfloat16)
        self.autocast = autocast if cast else contextlib.nullcontext
        host = [trainer.train_loader.host_batch(i) for i in range(BATCHES)] if feed is None else []
        self.batches = [jax.tree.map(lambda rows: to_torch(rows).to(self.device), batch) for batch in host]
        if self.task.twin.inputs is not None:  # before the clock starts, and outside of what torch compiles
            self.batches = [self.task.twin.inputs(batch, self.config) for batch in self.batches]
        self.coming = itertools.cycle(self.batches) if feed is None else self._read(feed)
        self.updates = 0

    def compiled(self) -> "TorchSide":
        """The same module, optimizer and batches under torch.compile, the loss as one graph."""
        other = copy.copy(self)
        other.compute = compiled_whole(self.compute)
        return other

    def _read(self, feed: Any) -> Iterator[dict[str, Any]]:
        """Epoch after epoch."""
        while True:
            for batch in feed:
                yield {name: rows.to(self.device) for name, rows in batch.items()}

    def _groups(self) -> list[dict[str, Any]]:
        from jaxtrain.task import group_of

        optim, kinds = self.config.optim, {}
        for key, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            name = group_of(self.task, key, self.config)
            own = optim.groups.get(name)
            lr = optim.lr if own is None or own.lr is None else own.lr
            decay = optim.weight_decay if own is None or own.weight_decay is None else own.weight_decay
            spared = not optim.decay_bias_and_norm and parameter.ndim < 2
            kinds.setdefault((lr, 0.0 if spared else decay), []).append(parameter)
        return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in kinds.items()]

    def _betas(self) -> tuple[float, float]:
        return self.config.optim.beta1, self.config.optim.beta2

    def step(self, batch: dict[str, Any]) -> Any:
        import torch

        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.compute(batch)
        loss.backward()
        if self.config.optim.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip_norm)
        self.optimizer.step()
        self.updates += 1
        if self.task.twin.after_update is not None:
            self.task.twin.after_update(self.module, self.updates, self.config)
        return loss.detach()

    def run(self, steps: int) -> float:
        import torch

        started = time.perf_counter()
        for batch in itertools.islice(self.coming, steps):
            self.step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def forget_peak(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """torch tells it on a GPU only."""
        import torch

        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None


def compiled_whole(compute, backend: Any = "inductor"):
    """Return a loss under torch.compile, which raises where the loss would not be one graph."""
    import torch

    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # else one program per position of a ring buffer
    return torch.compile(compute, fullgraph=True, backend=backend)


def wrapped(module, loss, config):
    """batch -> loss as a module, which is what DistributedDataParallel and torch.compile wrap."""
    import torch

    from jaxtrain.lazy import lazy

    loss = loss.function if isinstance(loss, lazy) else loss  # torch.compile does not follow an import

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, batch):
            return loss(self.module, batch, config)

    return Loss()
