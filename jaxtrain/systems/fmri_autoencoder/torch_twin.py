"""Both networks in plain torch: they load an exported state dict with strict=True and serve as the torch baseline."""

import torch
from torch import nn

from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.systems.fmri_autoencoder.losses import OUTPUTS
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_head import MultimodalAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_losses import criterion


def build(config) -> nn.Module:
    """Build the module of a config's model section."""
    kind = MultimodalAutoencoder if isinstance(config.model, HeadOptions) else SherlockAutoencoder
    return kind.of(config.model)


def call(module, batch) -> dict[str, torch.Tensor]:
    result = module(batch["video"], batch["audio"], batch["text"])
    return {name: result[name] for name in OUTPUTS}


def inputs(batch, config) -> dict[str, torch.Tensor]:
    """Return the valid rows of a batch."""
    valid = batch["valid"].bool()
    return {name: value[valid].contiguous() for name, value in batch.items() if name != "valid"}


def loss(module, batch, config) -> torch.Tensor:
    """Return the loss of the config's criterion on the valid rows of a batch."""
    batch = inputs(batch, config) if "valid" in batch else batch
    targets = (batch[name].float() for name in ("video", "audio", "text", "fmri"))
    return criterion(config)(call(module, batch), *targets)[0]
