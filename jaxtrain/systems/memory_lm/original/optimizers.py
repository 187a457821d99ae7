"""The original's optimizer over a torch model, and a training state's moments in it."""

from collections.abc import Mapping
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original import checkpoint_files, torch_models
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig


def make_optimizer(model: torch.nn.Module, settings: Any, training: TrainingConfig) -> torch.optim.Optimizer:
    """The original's optimizer: one group per part in its order, each with its name and rate.

    Raises UserError, a ValueError, where nothing is trained.
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
    """Put a training state's moments and rates into torch's optimizer, by the parameters' names."""
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
