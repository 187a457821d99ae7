"""Exchange buffers and gradients between the processes of DistributedDataParallel modules, around compiled steps."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.from_torch import unwrapped
from torch_bridge.loose_parameters import given

Forwards = tuple[tuple[str, bool], ...]  # (module's name, whether this forward pass's gradient is averaged)
_INSTEAD = "take jaxtrain.accelerate.Accelerator, whose backward pass is torch's"


class Replicas:
    """The DistributedDataParallel modules of a step. With several processes, each computes on its own batch, and
    buffers and gradients are exchanged in the order and by the rules of torch's reducer.

    modules: as given by the user, by name. arguments: the objects to pass to the loss function for them. The wrappers'
    attributes `require_forward_param_sync` and `require_backward_grad_sync` (no_sync) are read and updated as by their
    own forward.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        self.wrappers = {name: found for name, module in modules.items() if (found := _wrapper(module)) is not None}
        self.arguments = tuple(self.wrappers.get(name) or unwrapped(module) for name, module in given(modules).items())
        self.averaged = [
            name for name, module in self.wrappers.items() if distributed.get_world_size(module.process_group) > 1
        ]
        for name in self.averaged:
            _check(name, self.wrappers[name])
        self._held = {name: _parameters(self.wrappers[name]) for name in self.averaged}
        self._forwards: list[tuple[str, bool]] = []

    @property
    def process(self) -> int:
        """Return the rank of this process."""
        return distributed.get_rank()

    @property
    def forwards(self) -> Forwards:
        """Return the wrappers' forward passes in the last `local()`."""
        return tuple(self._forwards)

    @contextlib.contextmanager
    def local(self, before: Callable[[str, bool], None] | None = None) -> Iterator[None]:
        """Inside the context, calling a wrapper calls its module and exchanges nothing. before: called before each
        forward pass with its entry of `forwards`."""
        self._forwards.clear()
        syncing = {name: module.require_backward_grad_sync for name, module in self.wrappers.items()}

        def forward(name: str, *args: Any, **kwargs: Any) -> Any:
            wrapper = self.wrappers[name]
            inside = wrapper.require_backward_grad_sync or not syncing[name]  # else the loss itself calls no_sync()
            wanted = torch.is_grad_enabled() and inside
            if before is not None:
                before(name, wanted)
            self._forwards.append((name, wanted))
            return wrapper.module(*args, **kwargs)

        try:
            for name, module in self.wrappers.items():
                module.forward = functools.partial(forward, name)
            yield
        finally:
            for module in self.wrappers.values():
                vars(module).pop("forward", None)

    def check(self) -> None:
        """Raise UserError if torch would exchange gradients by other rules in this call: inside join(), or with
        hooks."""
        for name in self.averaged:
            module = self.wrappers[name]
            if module._join_config.enable:
                raise UserError(
                    f"{name}: DistributedDataParallel.join() lets processes end apart, and a compiled step wants every "
                    "process in every call; give each the same number of batches (DistributedSampler does)"
                )
            _check_hooks(name, module)

    def check_parameters(self) -> None:
        """Raise UserError if torch would not average the gradient of a parameter added or unfrozen later."""
        for name, held in self._held.items():
            wrapper, known = self.wrappers[name], set(map(id, held))
            late = [key for key, p in _trainable(wrapper) if id(p) not in known]
            if late:
                raise UserError(
                    f"{name}: {late[0]} has been added or unfrozen since DistributedDataParallel was made, which would "
                    "not average its gradients: make the wrapper, and this step, after the change"
                )

    def parameters(self, name: str) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are averaged, in the order in which the processes send them."""
        return [parameter for parameter in self._held[name] if parameter.requires_grad]

    def buffers(self, name: str) -> list[torch.Tensor]:
        """Return the buffers that the next forward pass receives from the group's first process; [] if it receives
        none."""
        module = self.wrappers[name]
        module._assign_modules_buffers()  # the module's buffers may have been replaced
        return list(module.modules_buffers) if module.will_sync_module_buffers() else []

    def allows_unused(self, name: str) -> bool:
        """Return True if parameters may get no gradient."""
        return self.wrappers[name].find_unused_parameters or self.wrappers[name].static_graph

    def exchanges_twice(self, forwards: Forwards, changed: Collection[int]) -> str | None:
        """Return the name of a module whose buffers torch would exchange again between two forward passes of one loss.

        changed: ids of the buffers that the loss changes.
        """
        names = [name for name, _ in forwards]
        for name in self.averaged:
            wrapper = self.wrappers[name]
            if names.count(name) > 1 and wrapper.broadcast_buffers:
                wrapper._assign_modules_buffers()
                if any(id(buffer) in changed for buffer in wrapper.modules_buffers):
                    return name
        return None

    def note(self, name: str, wanted: bool) -> None:
        """Update the wrapper as torch's forward does: if its gradients are averaged, the next forward pass exchanges
        buffers."""
        self.wrappers[name].require_forward_param_sync = wanted and self.syncs(name)

    def syncs(self, name: str) -> bool:
        """Return False inside no_sync()."""
        return self.wrappers[name].require_backward_grad_sync

    def broadcast(self, name: str, values: Sequence[Any]) -> list[np.ndarray] | None:
        """Return the values of the group's first process; None on that process itself."""
        wrapper = self.wrappers[name]
        raw = np.concatenate([np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values])
        sent = torch.from_numpy(raw).to(wrapper.device)
        distributed.broadcast(sent, group=wrapper.process_group, group_src=0)
        if distributed.get_rank(wrapper.process_group) == 0:
            return None
        pieces = np.split(sent.numpy(force=True), np.cumsum([value.nbytes for value in values])[:-1])
        return [piece.view(value.dtype).reshape(value.shape) for piece, value in zip(pieces, values, strict=True)]

    def mean(self, name: str, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the means of these vectors over the module's processes."""
        group = self.wrappers[name].process_group
        return [to_numpy(tensor) for tensor in self._summed(name, values, 1.0 / distributed.get_world_size(group))]

    def any(self, name: str, values: Sequence[bool]) -> list[bool]:
        """Return for each value whether it is True on at least one of the module's processes."""
        (counts,) = self._summed(name, [np.array(values, np.int32)])
        return (counts > 0).tolist()

    def _summed(self, name: str, values: Sequence[np.ndarray], factor: float | None = None) -> list[torch.Tensor]:
        wrapper = self.wrappers[name]
        tensors = [to_torch(value).to(wrapper.device) for value in values]
        for tensor in tensors:
            if factor is not None:
                tensor.mul_(factor)  # before the sum, as torch's reducer
            sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            distributed.all_reduce(sent, group=wrapper.process_group)
        return tensors


def _wrapper(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel among a module's wrappers, or None."""
    while not isinstance(module, DistributedDataParallel):
        if isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        elif isinstance(module, torch.nn.DataParallel):
            module = module.module
        else:
            return None
    return module


def _trainable(wrapper: DistributedDataParallel, frozen: bool = False) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that a wrapper averages, by name. frozen: include those that require no gradient."""
    ignored, named = wrapper.parameters_to_ignore, wrapper.module.named_parameters()
    return [(name, p) for name, p in named if (p.requires_grad or frozen) and name not in ignored]


def _parameters(wrapper: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters that the wrapper was made to average, found by their logged number: all, or those trained
    now."""
    known, everything = wrapper._get_ddp_logging_data()["num_parameter_tensors"], _trainable(wrapper, frozen=True)
    return [p for _, p in (everything if known == len(everything) else _trainable(wrapper))]


def _check(name: str, wrapper: DistributedDataParallel) -> None:
    """Raise UserError for options of DistributedDataParallel that a compiled step does not support."""
    if wrapper.mixed_precision is not None:
        raise UserError(f"{name}: mixed_precision of DistributedDataParallel casts inside torch; give precision='bf16'")
    if wrapper._delay_all_reduce_params:
        raise UserError(
            f"{name}: delay_all_reduce_named_params orders torch's own backward pass; leave it out, all gradients are "
            "averaged at once here"
        )
    if hasattr(wrapper, "buffer_hook"):
        raise UserError(f"{name}: a buffer hook of DistributedDataParallel does not run in a compiled step; {_INSTEAD}")
    _check_hooks(name, wrapper)
    known, now = wrapper._get_ddp_logging_data()["num_parameter_tensors"], len(_trainable(wrapper))
    if now > known:
        raise UserError(
            f"{name}: {now} parameters require a gradient, {known} did when DistributedDataParallel was made, and it "
            "averages only theirs: make the wrapper after the change"
        )


def _check_hooks(name: str, wrapper: DistributedDataParallel) -> None:
    if wrapper._comm_hooks:
        hook = getattr(wrapper._comm_hooks[0][0], "__name__", "its hook")
        raise UserError(
            f"{name}: {hook} of register_comm_hook averages gradients inside torch's backward pass, which a compiled "
            f"step does not run; {_INSTEAD}"
        )
