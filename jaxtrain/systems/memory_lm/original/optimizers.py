"""Make the original's optimizer for a torch model."""

from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original import checkpoint_files
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
