"""`jaxtrain.compile` and `jaxtrain.compile_many`: a compiled training step for the user's own training loop."""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from jaxtrain.compiled_step.shared_weights import SharedWeights
from jaxtrain.compiled_step.step import CompiledStep
from jaxtrain.compiled_step.steps import CompiledSteps
from jaxtrain.config import ShardConfig
from jaxtrain.errors import UserError
from jaxtrain.optim.several import OptimizerList, SchedulerList
from jaxtrain.runtime import compile_cache, gpus, host_memory, jax_settings, joining
from jaxtrain.runtime.mesh import make_layout
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.torch_task import is_torch_module

__all__ = ["CompiledStep", "CompiledSteps", "compile", "compile_many"]


def compile(
    module: Any,
    loss_fn: Callable[..., Any],
    optimizer: Any,
    scheduler: Any = None,
    *,
    accumulate: int = 1,
    precision: Literal["fp32", "bf16"] = "fp32",
    clip_norm: float | None = None,
    shard: str | Mapping[str, Any] = "ddp",
    devices: Sequence[Any] | None = None,
    seed: int | None = None,
    wait: bool = False,
    weights: Any = None,
) -> CompiledStep:
    """Compile forward, backward, clipping and update of a torch module into one XLA program, for your own loop.

    Args:
        module: a torch.nn.Module.
        loss_fn: (module, batch) -> a scalar tensor, or (scalar, dict of scalars to log).
        optimizer: a torch.optim optimizer over the module's parameters, and others that the loss reads, a list of
            several, or an optax GradientTransformation; your own class runs in torch, around compiled modules.
        scheduler: a torch lr_scheduler, or a list, stepped after every update; one that you step yourself works too,
            because the rates are read from `optimizer.param_groups` at every call.
        accumulate: calls per update; their gradients are averaged.
        precision: of the forward and backward pass.
        clip_norm: largest global gradient norm, as in torch's clip_grad_norm_.
        shard: how the devices share the work: ddp, shard_grad_op, fsdp, hsdp, or a dict of the shard section, as
            {"strategy": "hsdp", "replicas": 2}. Each batch is the global one; under a launcher of several processes,
            this one's rows of it.
        devices: JAX devices; default: all, of all processes.
        seed: for dropout; default: torch's.
        wait: for XLA at each new program, for the same bits in each run; else torch runs the steps meanwhile.
        weights: a .safetensors, .pt or Hugging Face folder of the module's state dict, read one tensor at a time
            straight to the devices. The module may be on the meta device; torch's tensors get values when read.

    Raises:
        UserError: if something cannot be converted, before anything is trained.

    Examples:
        >>> import torch, jaxtrain
        >>> module = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> loss_fn = lambda module, batch: (module(batch) - batch.sum(1, keepdim=True)).square().mean()
        >>> step = jaxtrain.compile(module, loss_fn, optimizer, wait=True)
        >>> x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        >>> losses = [float(step(x)) for _ in range(100)]  # a loss stays on the device until it is read
        >>> losses[-1] < 1e-3 < losses[0]
        True
        >>> step.sync()  # weights and optimizer state back in the torch objects
        >>> bool((module.weight - 1).abs().max() < 0.1)
        True
    """
    updates = {"loss": (loss_fn, optimizer, scheduler)}
    many = compile_many(
        {"module": module},
        updates,
        accumulate=accumulate,
        precision=precision,
        clip_norm=clip_norm,
        shard=shard,
        devices=devices,
        seed=seed,
        wait=wait,
        weights=weights,
    )
    return many["loss"]


def compile_many(
    modules: Mapping[str, Any],
    updates: Mapping[str, tuple],
    *,
    accumulate: int = 1,
    precision: Literal["fp32", "bf16"] = "fp32",
    clip_norm: float | None = None,
    shard: str | Mapping[str, Any] = "ddp",
    devices: Sequence[Any] | None = None,
    seed: int | None = None,
    wait: bool = False,
    weights: Any = None,
) -> CompiledSteps:
    """Compile several updates over shared modules: GAN, actor and critic, teacher and student.

    Args:
        modules: torch modules by name.
        updates: by name (loss_fn, optimizer) or (loss_fn, optimizer, scheduler). loss_fn takes the modules in order,
            then the batch; only the parameters of its optimizer are updated.
        accumulate: this and all others as in `compile`.

    Raises:
        UserError: if something cannot be converted, before anything is trained.

    Examples:
        >>> import torch, jaxtrain
        >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> apart = lambda a, b, x: (a(x) - b(x)).square().mean()
        >>> updates = {
        ...     "first": (apart, torch.optim.SGD(a.parameters(), 0.1)),
        ...     "second": (apart, torch.optim.SGD(b.parameters(), 0.1)),
        ... }
        >>> steps = jaxtrain.compile_many({"a": a, "b": b}, updates, wait=True)
        >>> x = torch.randn(8, 2)
        >>> losses = steps(x)  # all updates in order, a program each
        >>> sorted(losses), bool(steps["first"](x) < losses["first"])  # or one at a time
        (['first', 'second'], True)
    """
    if precision not in POLICIES or POLICIES[precision].scaled or POLICIES[precision].float8:
        raise UserError(f"precision: {precision!r} is not offered for a compiled step; take fp32 or bf16")
    if accumulate < 1:
        raise UserError(f"accumulate: {accumulate}, wanted at least 1")
    if clip_norm is not None and not (isinstance(clip_norm, numbers.Real) and clip_norm > 0):
        raise UserError(f"clip_norm: {clip_norm!r}, wanted a number above 0, or None")
    _check_functions(modules, updates)
    jax_settings.check()
    if devices is None and not _is_replicated(modules):
        _join()
    gpus.share_memory()
    compile_cache.enable()
    host_memory.keep()
    layout = make_layout(_shard(shard), None, None if devices is None else list(devices))
    if layout.per_device:
        raise UserError(f"shard: {layout.strategy!r} is not offered for a compiled step; take ddp")
    losses = [(loss_fn, _several(optimizer)) for loss_fn, optimizer, *_ in updates.values()]
    shared = SharedWeights(modules, layout, seed, losses, weights)
    steps = {}
    for index, (name, given) in enumerate(updates.items()):
        loss_fn, optimizer, scheduler = (*given, None)[:3]
        if _several(optimizer) != [optimizer]:
            optimizer = OptimizerList(_several(optimizer))
        if isinstance(scheduler, list | tuple):
            scheduler = SchedulerList(scheduler)
        steps[name] = CompiledStep(
            index, shared, loss_fn, optimizer, scheduler, accumulate, POLICIES[precision], clip_norm, wait
        )
    return CompiledSteps(steps)


def _join() -> None:
    """Connect to the processes that a launcher started, as a Trainer does. Raises UserError if they cannot meet."""
    joined = joining.join("jaxtrain.compile")
    if joined is not None and joined.process == 0:
        print(joined, flush=True)


def _is_replicated(modules: Mapping[str, Any]) -> bool:
    """Return True if torch itself exchanges gradients of a module between processes."""
    from torch_bridge import replicas

    return replicas.are_replicas(replicas.arguments_of(modules))


def _shard(shard: str | Mapping[str, Any]) -> ShardConfig:
    """Return the section that `shard` means. Raises UserError naming what is wrong in it."""
    try:
        return ShardConfig.model_validate({"strategy": shard} if isinstance(shard, str) else dict(shard))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"shard: {where}: {first['msg']}, got {first['input']!r}") from None


def _several(optimizer: Any) -> list[Any]:
    several = isinstance(optimizer, list | tuple) and not hasattr(optimizer, "init")  # optax: a named tuple
    return list(optimizer) if several else [optimizer]


def _check_functions(modules: Mapping[str, Any], updates: Mapping[str, tuple]) -> None:
    """Raise UserError for anything but a torch.nn.Module, and for a loss that cannot take the modules and a batch."""
    for name, module in modules.items():
        if not is_torch_module(module):
            kind = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
            raise UserError(f"{name}: {kind}, wanted a torch.nn.Module")
    called = f"({', '.join([*modules, 'batch'])})"
    for loss_fn, *_ in updates.values():
        named = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        if str(getattr(loss_fn, "__module__", "")).startswith("torch.nn."):
            raise UserError(
                f"loss_fn: {named} compares an output with a target, and is called as {called} here: write a function, "
                "lambda module, batch: criterion(module(batch[0]), batch[1])"
            )
        try:
            inspect.signature(loss_fn).bind(*modules, "batch")
        except TypeError as error:
            raise UserError(f"loss_fn: {named} is called as {called}: {error}") from None
        except ValueError:
            pass  # a built-in function has no signature to check
