"""The task's outputs and loss for the torch twin: the same numbers as in JAX, on the same masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

from jaxtrain.nn.vit import overrides, vit_size
from jaxtrain.systems.hjepa import device_images, device_masks
from jaxtrain.systems.hjepa.loss_registry import jepa_options
from jaxtrain.systems.hjepa.losses import level_weights
from jaxtrain.systems.hjepa.pretraining import momentum
from jaxtrain.systems.hjepa.views import sample_keys


def outputs(module, batch):
    size = module.context_encoder.vit.grid * module.context_encoder.vit.size.patch_size
    return {"features": module.extract_features(prepared(batch["image"], size)).mean(1)}


def prepared(images: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 images as the evaluation transform leaves them; float images as they are."""
    if images.dtype != torch.uint8:
        return images
    return torch.from_numpy(np.array(_prepare(size)(images.cpu().numpy()))).to(images.device)


@functools.lru_cache(maxsize=4)
def _prepare(size: int):
    return jax.jit(lambda images: device_images.prepare(images, size))


def loss(module, batch, config) -> torch.Tensor:
    """The pure H-JEPA losses (mse, smoothl1, huber, hjepa) on the masks that JAX draws for this batch in evaluation."""
    valid = batch["valid"]
    images, mask = prepared(batch["image"], config.data.image_size), masks(batch, config)
    predictions, targets, _, _ = module(images[valid], mask[valid])
    options = jepa_options(config.loss)
    weights = level_weights(options["hierarchy_weights"], len(predictions))
    distance = {
        "mse": functional.mse_loss,
        "smoothl1": functional.smooth_l1_loss,
        "huber": functools.partial(functional.huber_loss, delta=options["huber_delta"]),
    }[options["loss_type"]]
    total = torch.zeros((), device=images.device)
    for weight, prediction, target in zip(weights, predictions, targets, strict=True):
        target = target.detach() if options["detach_targets"] else target
        if options["normalize_embeddings"]:
            prediction, target = (functional.normalize(x, dim=-1, eps=1e-8) for x in (prediction, target))
        total = total + weight * distance(prediction, target)
    return total


@torch.no_grad()
def after_update(module, updates: int, config) -> None:
    """Move the target encoder towards the context encoder."""
    rate = float(momentum(config, updates - 1))
    target, context = (list(encoder.parameters()) for encoder in (module.target_encoder, module.context_encoder))
    torch._foreach_lerp_(target, context, 1 - rate)


def masks(batch, config) -> torch.Tensor:
    """bool [batch, patch]: the loader's masks, or those that the step draws in evaluation mode."""
    if "mask" in batch:
        return batch["mask"]
    return torch.from_numpy(np.array(_draw(config)(jnp.asarray(batch["index"].cpu().numpy()))))


def _draw(config):
    masking = config.masking
    grid = config.data.image_size // vit_size(config.model.encoder_type, **overrides(config.model.vit)).patch_size
    blocks = device_masks.blocks_of(masking)
    count = device_masks.fixed_count(grid, blocks, masking.ratio)

    def draw(index):
        return device_masks.draw(sample_keys(index, None, config.seed)[1], grid, blocks, count)

    return draw
