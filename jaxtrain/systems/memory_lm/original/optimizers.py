"""Make the original's optimizer for a torch model, and load a training state's moments into it."""

from collections.abc import Mapping
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original import checkpoint_files, torch_models
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig


def make_optimizer(model: torch.nn.Module, settings: Any, training: TrainingConfig) -> torch.optim.Optimizer:
    """Return the original's optimizer, with a named parameter group and learning rate per part, in its order.

    Raises UserError, a ValueError, if every parameter is frozen.
    """
    from jaxtrain.systems.memory_lm.param_groups import param_group

    members: dict[str, list] = {name: [] for name in checkpoint_files.GROUPS}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[param_group(key, settings)].append(parameter)
    rates = {name: group.lr for name, group in settings.optim.groups.items()}
    groups = [{"params": params, "lr": rates[name], "name": name} for name, params in members.items() if params]
    if not groups:
        raise UserError("nothing to train: every parameter is frozen")
    optim = settings.optim
    adam = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps, "weight_decay": optim.weight_decay}
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, **adam)
    if training.optimizer == "adam":
        return torch.optim.Adam(groups, **adam)
    return torch.optim.SGD(groups, lr=groups[0]["lr"], momentum=0.9, weight_decay=optim.weight_decay)


def place_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy a training state's moments and learning rates into a torch optimizer, matched by parameter names."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for group in saved["param_groups"]:
        name = str(group["name"]).removesuffix(" without decay")
        for mine in optimizer.param_groups:
            if mine["name"] == name:
                mine["lr"] = group["lr"]
        for number, key in zip(group["params"], group["param_names"], strict=True):
            if number in saved["state"]:
                entry = {field: torch_models.as_tensor(value) for field, value in saved["state"][number].items()}
                optimizer.state[own[key]] = entry
