"""Functions of the original under its names, for scripts that change only their imports."""

import json
import pathlib

import numpy as np
import torch

from jaxtrain.systems.set_completion.original import training


def DistributedDataParallel(module, *arguments, **options):
    """Return the module unchanged: the trainer replicates it and averages gradients itself (`shard.strategy: ddp`)."""
    return module


def DataLoader(dataset, *arguments, non_blocking: bool = True, **options) -> torch.utils.data.DataLoader:
    """Return torch's DataLoader, which Trainer takes. non_blocking: ignored; torch's own does not accept it."""
    return torch.utils.data.DataLoader(dataset, *arguments, **options)


def fit(model=None, train_data=None, val_data=None, config=None, *arguments, **options):
    """Train to the end with early stopping and schedule; return the result of the function that trains.

    config: with the original's TrainingConfig it calls `train_model` with all arguments; with jaxtrain's, or None, it
    calls `jaxtrain.Trainer(model, train_data, val_data, config).train()`, which returns the history.
    """
    if isinstance(config, training.TrainingConfig):
        return training.train_model(model, train_data, val_data, config, *arguments, **options)
    from jaxtrain import Trainer, TrainingConfig

    config = config or TrainingConfig(task="set_completion.complete")
    return Trainer(model, train_data, val_data, config, task=config.task).train()


def save_artifacts(config, state: dict, folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Write the original's files from an exported state dict; return their paths.

    They are model.pth, model_params.json and training_args.json; for the `sae` task sae_model_final.pth and
    sae_run_config.json too. Tensors are not changed.
    """
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
