"""The original's pictures of attention in the encoder. Rollout: Abnar and Zuidema 2020."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.pictures import array, done, draw, heat, on_grid, sheet

Size = tuple[float, float]


@torch.no_grad()
def extract_attention_maps(
    model: Any, images: torch.Tensor, layer_indices: Sequence[int] | None = None
) -> dict[int, torch.Tensor]:
    """Return the attention weights [batch, head, token, token] by layer, of the target encoder where there is one.

    model: an HJEPA or an encoder. Token 0 is the class token. layer_indices: all layers without it; -1 is the last.
    """
    encoder = getattr(model, "target_encoder", None) or getattr(model, "context_encoder", model)
    blocks = list(encoder.vit.blocks)
    indices = range(len(blocks)) if layer_indices is None else layer_indices
    if any(not -len(blocks) <= index < len(blocks) for index in indices):
        raise UserError(f"layer_indices={list(indices)}: the encoder has {len(blocks)} layers")
    maps: dict[int, torch.Tensor] = {}

    def record(index: int) -> Any:
        def hook(attention: Any, arguments: tuple, keywords: dict) -> None:
            tokens, *rest = arguments
            rotation = rest[0] if rest else keywords.get("rotation")
            shape = (*tokens.shape[:2], 3, attention.num_heads, -1)
            query, key, _ = attention.qkv(tokens).reshape(shape).permute(2, 0, 3, 1, 4)
            if rotation is not None:
                query, key = rotation(query), rotation(key)
            maps[index] = (query @ key.transpose(-2, -1) * attention.scale).softmax(-1)

        return hook

    hooks, training = [], encoder.training
    for index in sorted({index % len(blocks) for index in indices}):
        inner = blocks[index].attn
        inner = getattr(inner, "attn", inner)  # inside the wrapper of rotary positions
        hooks.append(inner.register_forward_pre_hook(record(index), with_kwargs=True))
    try:
        encoder.eval()(images if images.ndim == 4 else images[None])
    finally:
        encoder.train(training)
        for hook in hooks:
            hook.remove()
    return maps


def rollout(maps: Mapping[int, torch.Tensor], start_layer: int = 0) -> torch.Tensor:
    """Return how much of each patch reaches the class token, [batch, patch], through the layers from start_layer on."""
    total = None
    for layer in sorted(maps):
        if layer >= start_layer:
            weights = maps[layer].mean(1)
            mixed = (weights + torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)) / 2
            total = mixed if total is None else mixed @ total
    if total is None:
        raise UserError(f"start_layer={start_layer}: the encoder has {len(maps)} layers")
    return total[:, 0, 1:]


def visualize_attention_maps(
    attention_maps: Mapping[int, torch.Tensor] | Sequence[torch.Tensor],
    image: Any = None,
    layer_indices: Sequence[int] | None = None,
    head_indices: Sequence[int] | None = None,
    save_path: Any = None,
    figsize: Size = (16, 12),
) -> Any:
    """Draw what the class token attends to, a row per layer and a column per head; return the figure."""
    maps = dict(attention_maps if isinstance(attention_maps, Mapping) else enumerate(attention_maps))
    layers = list(maps) if layer_indices is None else list(layer_indices)
    heads = list(range(next(iter(maps.values())).shape[1])) if head_indices is None else list(head_indices)
    figure, axes = sheet(len(layers) * len(heads), figsize, len(heads))
    for number, axis in enumerate(axes):
        layer, head = layers[number // len(heads)], heads[number % len(heads)]
        heat(axis, image, on_grid(maps[layer][0, head, 0, 1:]), f"layer {layer}, head {head}")
    return done(figure, save_path)


def visualize_multihead_attention(
    model: Any, image: torch.Tensor, layer_idx: int = -1, save_path: Any = None, figsize: Size = (16, 10)
) -> Any:
    """Draw what the class token attends to in each head of a layer; return the figure."""
    maps = extract_attention_maps(model, image, [layer_idx])
    (weights,) = maps.values()
    figure, axes = sheet(weights.shape[1], figsize)
    for head, axis in enumerate(axes):
        heat(axis, image, on_grid(weights[0, head, 0, 1:]), f"head {head}")
    return done(figure, save_path)


def visualize_patch_to_patch_attention(
    model: Any,
    image: torch.Tensor,
    patch_idx: int,
    layer_idx: int = -1,
    original_image: Any = None,
    save_path: Any = None,
    figsize: Size = (10, 5),
) -> Any:
    """Draw what a patch (row-major, from 0) attends to in a layer, the mean over heads; return the figure."""
    (weights,) = extract_attention_maps(model, image, [layer_idx]).values()
    if not 0 <= patch_idx < weights.shape[-1] - 1:
        raise UserError(f"patch_idx={patch_idx} is outside [0, {weights.shape[-1] - 1})")
    grid = on_grid(weights[0, :, 1 + patch_idx, 1:].mean(0))
    figure, (over, plain) = sheet(2, figsize)
    heat(over, image if original_image is None else original_image, grid, "attention")
    figure.colorbar(draw(plain, grid, f"from patch {patch_idx}"), ax=plain)
    plain.plot(patch_idx % grid.shape[1], patch_idx // grid.shape[1], "r+")
    return done(figure, save_path)


def visualize_attention_rollout(
    model: Any,
    image: torch.Tensor,
    original_image: Any = None,
    start_layer: int = 0,
    save_path: Any = None,
    figsize: Size = (14, 5),
) -> Any:
    """Draw how much of each patch reaches the class token through all layers; return the figure."""
    grid = on_grid(rollout(extract_attention_maps(model, image), start_layer)[0])
    picture = image if original_image is None else original_image
    figure, axes = sheet(2, figsize)
    heat(axes[0], picture, grid, "rollout")
    figure.colorbar(draw(axes[1], grid, "share of each patch"), ax=axes[1])
    return done(figure, save_path)


@torch.no_grad()
def visualize_hierarchical_attention(
    model: Any, image: torch.Tensor, original_image: Any = None, save_path: Any = None, figsize: Size = (16, 5)
) -> Any:
    """Draw the length of each token's features at each level of an HJEPA; return the figure.

    Levels pool neighbours of the row-major list of patches, so a level's tokens are drawn over the patches they pool.
    """
    images = image if image.ndim == 4 else image[None]
    lengths = [model.extract_features(images, level=level)[0].norm(dim=-1) for level in range(model.num_hierarchies)]
    patches = len(lengths[0])
    figure, axes = sheet(len(lengths), figsize)
    for level, (axis, values) in enumerate(zip(axes, lengths, strict=True)):
        each = array(values).repeat(2**level)
        each = [*each, *[each[-1]] * (patches - len(each))]
        heat(axis, images[0] if original_image is None else original_image, on_grid(each[:patches]), f"level {level}")
    return done(figure, save_path)
