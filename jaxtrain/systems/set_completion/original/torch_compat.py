"""The names of the original's README and code, for scripts that change only their imports."""

import json
import pathlib
import weakref

import numpy as np
import torch

from jaxtrain.systems.set_completion.masking import SetDataset
from jaxtrain.systems.set_completion.original.early_stopping import EarlyStopping
from jaxtrain.systems.set_completion.torch_buffer import ActivationBuffer
from jaxtrain.systems.set_completion.torch_twin import SetCompletionModel, SparseAutoencoder
from torch_bridge.state_dict import convert_ddp_state

_PROGRAMS = weakref.WeakKeyDictionary()  # the compiled step of each trainer that train_epoch was called with

__all__ = [
    "ActivationBuffer",
    "DataLoader",
    "DistributedDataParallel",
    "EarlyStopping",
    "SetCompletionModel",
    "SetDataset",
    "SparseAutoencoder",
    "convert_ddp_state",
    "create_collate_fn",
    "fit",
    "save_artifacts",
    "train_epoch",
    "validate",
]


def create_collate_fn(pad_token_id: int):
    """Items of SetDataset -> (inputs, weapons, targets, attention_mask), right-padded; mask True = real token."""

    def collate(items):
        inputs, weapons, targets = zip(*(tuple(map(torch.as_tensor, item)) for item in items), strict=True)
        pad = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
        inputs = pad(inputs)
        lengths = torch.tensor([len(item[0]) for item in items])[:, None]
        return inputs, torch.stack(weapons).reshape(-1, 1), pad(targets), torch.arange(inputs.shape[1]) < lengths

    return collate


def DistributedDataParallel(module, *arguments, **options):
    """The module as it is: the trainer replicates it and averages its gradients (`shard.strategy: ddp`)."""
    return module


def DataLoader(dataset, *arguments, non_blocking: bool = True, **options) -> torch.utils.data.DataLoader:
    """torch's own, which Trainer takes as it is. non_blocking: transfers never block; torch's own refuses the name."""
    return torch.utils.data.DataLoader(dataset, *arguments, **options)


def train_epoch(trainer) -> dict[str, float]:
    """One more pass of a jaxtrain.Trainer over its training data; the means of the epoch's metrics.

    `fit`, or Trainer.train, also evaluates, stops early, saves and resumes.
    """
    first, count = int(trainer.state.step), trainer.steps_per_epoch
    program = _PROGRAMS.setdefault(trainer, trainer.program.train_step(1))
    hyper, columns = trainer.program.hyper(), trainer.program.columns(trainer.train_loader)
    kept = []
    for _, _, batch in trainer.train_loader.batches([(step, 1) for step in range(first, first + count)]):
        trainer.state, metrics = program(trainer.state, batch, hyper, columns)
        kept.append(metrics)
    return {name: float(np.mean([np.asarray(metrics[name]) for metrics in kept])) for name in kept[0]}


def validate(trainer, split: str = "validation") -> dict[str, float]:
    """Metrics of a jaxtrain.Trainer's current weights on a whole split."""
    return trainer.evaluate(split)


def fit(model=None, train_dataset=None, val_dataset=None, config=None) -> dict:
    """Train to the end with early stopping and schedule: `jaxtrain.Trainer(...).train()`."""
    from jaxtrain import Trainer, TrainingConfig

    config = config or TrainingConfig(task="set_completion.complete")
    return Trainer(model, train_dataset, val_dataset, config, task=config.task).train()


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
        torch.save({key: torch.as_tensor(np.asarray(value)) for key, value in weights.items()}, folder / name)
    for name, text in texts.items():
        (folder / name).write_text(json.dumps(text, indent=2))
    return sorted(folder / name for name in (*parts, *texts))
