"""The names of the original's README and code, for scripts that change only their imports."""

import json
import pathlib

import numpy as np
import torch

from jaxtrain.systems.set_completion.original import training


def DistributedDataParallel(module, *arguments, **options):
    """The module as it is: the trainer replicates it and averages its gradients (`shard.strategy: ddp`)."""
    return module


def DataLoader(dataset, *arguments, non_blocking: bool = True, **options) -> torch.utils.data.DataLoader:
    """torch's own, which Trainer takes as it is. non_blocking: transfers never block; torch's own refuses the name."""
    return torch.utils.data.DataLoader(dataset, *arguments, **options)


def fit(model=None, train_data=None, val_data=None, config=None, *arguments, **options):
    """Train to the end with early stopping and schedule.

    config: a TrainingConfig of the original's makes it `train_model`, with what that takes; one of jaxtrain, or none,
    is `jaxtrain.Trainer(model, train_data, val_data, config).train()`, whose history it gives.
    """
    if isinstance(config, training.TrainingConfig):
        return training.train_model(model, train_data, val_data, config, *arguments, **options)
    from jaxtrain import Trainer, TrainingConfig

    config = config or TrainingConfig(task="set_completion.complete")
    return Trainer(model, train_data, val_data, config, task=config.task).train()


def save_artifacts(config, state: dict, folder: str | pathlib.Path) -> list[pathlib.Path]:
    """The original's files from an exported state dict: model.pth and model_params.json, or, of the `sae` task,
    sae_model_final.pth and sae_run_config.json too. Tensors stay as they are."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"model.pth": state}
    if any(key.startswith("sae.") for key in state):
        cut = lambda prefix: {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        parts = {"model.pth": cut("primary."), "sae_model_final.pth": cut("sae.")}
    texts = {"model_params.json": config.model.arguments(), "training_args.json": config.model_dump(mode="json")}
    if "sae_model_final.pth" in parts:
        width = config.model.hidden_dim
        hidden = int(width * config.sae.expansion_factor)
        texts["sae_run_config.json"] = {"sae_input_dim": width, "sae_hidden_dim": hidden, **config.sae.model_dump()}
    for name, weights in parts.items():
        torch.save({key: torch.from_numpy(np.array(value)) for key, value in weights.items()}, folder / name)
    for name, text in texts.items():
        (folder / name).write_text(json.dumps(text, indent=2))
    return sorted(folder / name for name in (*parts, *texts))
