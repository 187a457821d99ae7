"""Plain torch training loop for certificates. It runs on the user's own objects, which are restored afterwards."""

import contextlib
import copy
import dataclasses
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge import files
from torch_bridge.certificate.sides import loss_in_torch, modules_of, tensors_of
from torch_bridge.datasets import to_numpy
from torch_bridge.lowering.python.state import Watch
from torch_bridge.random_state import undrawn
from torch_bridge.training.torch_task import TorchTask


@dataclasses.dataclass(frozen=True)
class TorchParts:
    """Optimizer, scheduler and clipping of a torch loop. by_epoch: the scheduler steps after every epoch, otherwise
    after every update."""

    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    by_epoch: bool = False
    clip_norm: float | None = None


@dataclasses.dataclass(frozen=True)
class TorchRun:
    """Result of a torch run. losses: one per update. state: parameters and buffers after the last update, by name."""

    losses: list[float]
    state: dict[str, np.ndarray]


@contextlib.contextmanager
def borrowed(definition: TorchTask, parts: TorchParts | None = None) -> Iterator[None]:
    """Work on copies of the module's tensors; restore weights, modes, gradients, optimizer, attributes and the global
    random generators at the end."""
    modules = list(modules_of(definition).values())
    watches = [Watch(module) for module in modules]
    modes = [(inner, inner.training) for module in modules for inner in module.modules()]
    tensors = list({id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values())
    kept = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    buffers = [(inner._buffers, dict(inner._buffers)) for module in modules for inner in module.modules()]
    saved = None
    if parts is not None:
        saved = copy.deepcopy((parts.optimizer.state_dict(), parts.scheduler and parts.scheduler.state_dict()))
    try:
        for tensor in tensors:
            tensor.data, tensor.grad = tensor.data.clone(), None
        with undrawn():
            yield
    finally:
        for watch in watches:
            watch.restore()
        for held, before in buffers:
            held.update(before)  # module.double() replaces the buffers by other tensors
        for tensor, data, grad in kept:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad
        for module, training in modes:
            module.training = training
        if parts is not None and saved is not None:
            parts.optimizer.load_state_dict(saved[0])
            if parts.scheduler is not None:
                parts.scheduler.load_state_dict(saved[1])


@contextlib.contextmanager
def without_dropout(definition: TorchTask) -> Iterator[bool]:
    """Set every dropout rate to 0: in torch's layers, and in attributes of modules and configs named like it.

    Yields True if there was any nonzero rate.
    """
    changed: list[tuple[Any, str, Any]] = []
    held: dict[int, Any] = {}
    for module in definition.module.modules():
        held[id(module)] = module
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__"):
            held[id(config)] = config
    for holder in held.values():
        own = isinstance(holder, torch.nn.modules.dropout._DropoutNd)
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and value and ("drop" in name.lower() or (own and name == "p")):
                changed.append((holder, name, value))
                setattr(holder, name, 0.0)
    try:
        yield bool(changed)
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)


def draws_numbers(definition: TorchTask, batch: Mapping[str, Any], training: bool) -> tuple[float, float] | None:
    """Return the losses under two seeds if they differ, else None. A difference means that torch and JAX could not draw
    the same random numbers."""
    found = []
    for seed in (0, 1):
        with borrowed(definition), torch.no_grad():
            definition.module.train(training)
            torch.manual_seed(seed)
            found.append(float(loss_in_torch(definition, batch)))
    return (found[0], found[1]) if found[0] != found[1] else None


def train(
    definition: TorchTask,
    parts: TorchParts,
    batches: Sequence[Mapping[str, Any]],
    steps_per_epoch: int,
    double: bool = False,
    autocast: bool = False,
) -> TorchRun:
    """Make one update per batch. double: compute all in float64. autocast: run forward and loss under torch.autocast in
    bfloat16."""
    with borrowed(definition, parts), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the order of scheduler and optimizer steps
        for module in modules_of(definition).values():
            module.train()
            if double:
                module.double()
        if double:
            parts.optimizer.load_state_dict(parts.optimizer.state_dict())  # its moments follow the parameters' dtype
        parameters = [p for group in parts.optimizer.param_groups for p in group["params"]]
        losses = []
        for step, batch in enumerate(batches):
            parts.optimizer.zero_grad()
            with torch.autocast(parameters[0].device.type, torch.bfloat16, enabled=autocast):
                loss = loss_in_torch(definition, batch, double)
            loss.backward()
            if parts.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, parts.clip_norm)
            parts.optimizer.step()
            due = (step + 1) % steps_per_epoch == 0 if parts.by_epoch else True
            if parts.scheduler is not None and due:
                parts.scheduler.step()
            losses.append(float(loss))
        tensors, _ = tensors_of(definition)
        return TorchRun(losses, {name: np.array(to_numpy(tensor)) for name, tensor in tensors.items()})


def returned(
    definition: TorchTask, state: Mapping[str, Any], path: pathlib.Path, batch: Mapping[str, Any]
) -> tuple[list[tuple[str, bool]], np.ndarray]:
    """Save a state dict to a file and load it with strict=True into the zeroed module.

    Returns (name, whether its bits are unchanged) for each tensor, and torch's loss with them in evaluation mode. The
    module keeps the loaded values: call this inside `borrowed`.
    """
    files.save(state, path)
    modules = modules_of(definition)
    with torch.no_grad():
        for module in modules.values():
            for tensor in module.state_dict().values():
                tensor.zero_()
    loaded = torch.load(path, weights_only=True)
    own = {key for key in loaded if key.startswith("loss.")} if "loss" in modules else set()
    definition.module.load_state_dict({k: v for k, v in loaded.items() if k not in own}, strict=True)
    if own:
        modules["loss"].load_state_dict({key.removeprefix("loss."): loaded[key] for key in own}, strict=False)
    found = dict(definition.module.state_dict())
    found |= {f"loss.{key}": value for key, value in modules["loss"].state_dict().items()} if own else {}
    bits = [(name, np.array_equal(to_numpy(found[name]), np.asarray(value))) for name, value in state.items()]
    for module in modules.values():
        module.eval()
    with torch.no_grad():
        return bits, np.asarray(to_numpy(loss_in_torch(definition, batch)))


def of_config(definition: TorchTask, keys: Mapping[str, tuple[str, bool]], rates: Mapping, optim: Any, factor) -> Any:
    """Build torch's optimizer and schedule for the config section `optim`; None where torch.optim has no such
    optimizer.

    keys: parameter -> (its group, whether it decays). rates: lr and weight_decay by group. factor: update number ->
    factor on the learning rates.
    """
    tensors, _ = tensors_of(definition)
    groups: dict[tuple[str, bool], list[torch.Tensor]] = {}
    for key, group in keys.items():
        groups.setdefault(group, []).append(tensors[key])
    given = [
        {"params": held, "lr": float(rates["lr"][name]), "weight_decay": float(rates["weight_decay"][name]) * decays}
        for (name, decays), held in groups.items()
    ]
    adam = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    rules: dict[str, tuple[Any, dict]] = {
        "adamw": (torch.optim.AdamW, adam),
        "adam": (torch.optim.Adam, adam),
        "sgd": (torch.optim.SGD, {"momentum": optim.momentum, "nesterov": optim.nesterov}),
    }
    if optim.name not in rules:
        return None
    rule, options = rules[optim.name]
    optimizer = rule(given, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: float(factor(update)))
    return TorchParts(optimizer, scheduler, clip_norm=optim.clip_norm)
