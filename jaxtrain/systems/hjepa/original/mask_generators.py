"""The original's mask generators: those of `masks`, as bool tensors on a device. True = the patch belongs to the block.

They draw from numpy's global generator, so `np.random.seed(s)` reproduces the original's masks bit for bit.
"""

from typing import Any

import numpy as np
import torch

from jaxtrain.systems.hjepa import masks
from jaxtrain.systems.hjepa.masks import Range, statistics
from jaxtrain.systems.hjepa.original import mask_pictures
from jaxtrain.systems.hjepa.original.torch_checkpoint import available


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def to_tensors(drawn: Any, device: Any = None) -> Any:
    """Convert masks in nested dicts to tensors. device: used if torch has it, else the CPU."""
    if isinstance(drawn, dict):
        return {name: to_tensors(inner, device) for name, inner in drawn.items()}
    return torch.from_numpy(drawn).to("cpu" if device is None else available(device))


def _to_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_arrays(inner) for name, inner in value.items()}
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


class _OnGrid:
    """Sizes of the patch grid."""

    input_size: tuple[int, int]
    patch_size: int

    @property
    def num_patches_h(self) -> int:
        return self.input_size[0] // self.patch_size

    @property
    def num_patches_w(self) -> int:
        return self.input_size[1] // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.num_patches_h * self.num_patches_w


class MultiBlockMaskGenerator(_OnGrid, masks.MultiBlockMaskGenerator):
    """Mask generator: (batch_size, device) -> context bool [batch, patch], targets bool [batch, target, patch].

    Source: Assran et al. 2023 (I-JEPA).
    """

    def __init__(
        self,
        input_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        num_target_masks: int = 4,
        target_scale: Range = (0.15, 0.2),
        context_scale: Range = (0.85, 1.0),
        aspect_ratio_range: Range = (0.75, 1.5),
        max_attempts: int = 10,
    ):
        self.input_size, self.patch_size = _sides(input_size), patch_size
        self.aspect_ratio_range, self.max_attempts = tuple(aspect_ratio_range), max_attempts
        super().__init__(
            self.input_size, patch_size, num_target_masks, target_scale, context_scale, aspect_ratio_range, max_attempts
        )

    def __call__(self, batch_size: int, device: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        context, targets = super().__call__(batch_size)
        return to_tensors(context, device), to_tensors(targets, device)

    def sample_block(self, scale_range: Range, occupied: torch.Tensor | None = None) -> torch.Tensor:
        """Draw one block, bool [row, column], that avoids `occupied` if one of max_attempts succeeds."""
        return to_tensors(self.sampler.draw(scale_range, None if occupied is None else _to_arrays(occupied)))

    def get_mask_statistics(self, context_mask: torch.Tensor, target_masks: torch.Tensor) -> dict[str, float]:
        """Return means and unbiased standard deviations of the covered fractions, and the context-target overlap."""
        return statistics(_to_arrays(context_mask), _to_arrays(target_masks))

    def visualize_masks(self, context_mask, target_masks, sample_idx: int = 0, figsize=(12, 4), save_path=None):
        """Draw the context block and each target of a sample; return the matplotlib figure, or save it too."""
        sides = (self.num_patches_h, self.num_patches_w)
        panels = {"context": context_mask[sample_idx]}
        panels |= {f"target {i}": mask for i, mask in enumerate(target_masks[sample_idx])}
        return mask_pictures.grids(panels, sides, figsize, save_path)


class HierarchicalMaskGenerator(_OnGrid, masks.HierarchicalMaskGenerator):
    """Mask generator with one block scale per hierarchy level.

    Maps (batch_size, device) to {"level_0": {"context": [batch, patch], "targets": [batch, target, patch]}, ...}. Level
    l scales its blocks by 2^l ("geometric") or 1 + l ("linear"). Raises ValueError for another progression.
    """

    def __init__(
        self,
        input_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        num_hierarchies: int = 3,
        num_target_masks: int = 4,
        scale_progression: str = "geometric",
        base_scale: Range = (0.05, 0.15),
        aspect_ratio_range: Range = (0.75, 1.5),
        max_attempts: int = 10,
    ):
        self.input_size, self.patch_size = _sides(input_size), patch_size
        self.scale_progression, self.base_scale = scale_progression, tuple(base_scale)
        self.aspect_ratio_range, self.max_attempts = tuple(aspect_ratio_range), max_attempts
        super().__init__(
            self.input_size,
            patch_size,
            num_hierarchies,
            num_target_masks,
            scale_progression,
            base_scale,
            aspect_ratio_range,
            max_attempts,
        )

    def __call__(self, batch_size: int, device: Any = None) -> dict[str, dict[str, torch.Tensor]]:
        return to_tensors(super().__call__(batch_size), device)

    def get_hierarchical_statistics(self, masks: dict) -> dict[str, dict[str, float]]:
        """Return the statistics of MultiBlockMaskGenerator for each level."""
        return super().get_mask_statistics(_to_arrays(masks))

    def visualize_hierarchical_masks(self, masks, sample_idx: int = 0, figsize=(15, 5), save_path=None):
        """Draw a sample's targets, numbered, for each level; return the matplotlib figure, or save it too."""
        sides = (self.num_patches_h, self.num_patches_w)
        numbered = lambda targets: (targets * torch.arange(1, len(targets) + 1)[:, None]).amax(0)
        panels = {name: numbered(level["targets"][sample_idx].long().cpu()) for name, level in masks.items()}
        return mask_pictures.grids(panels, sides, figsize, save_path)

    def visualize_combined_view(self, masks, sample_idx: int = 0, figsize=(15, 5), save_path=None):
        """Draw a sample's context (1) and targets (2) on one grid for each level; return the matplotlib figure."""
        sides = (self.num_patches_h, self.num_patches_w)
        both = lambda level: torch.where(level["targets"][sample_idx].any(0), 2, level["context"][sample_idx].long())
        return mask_pictures.grids({name: both(level) for name, level in masks.items()}, sides, figsize, save_path)


class MultiCropMaskGenerator(masks.MultiCropMaskGenerator):
    """Mask generator for global and local crops: {"global_masks": {"crop_0": ...}, "local_masks": {...}}.

    masking_strategy: global_only, global_with_local_context or cross_crop_prediction; another raises ValueError.
    """

    def __init__(
        self,
        global_crop_size: int | tuple[int, int] = 224,
        local_crop_size: int | tuple[int, int] = 96,
        num_global_crops: int = 2,
        num_local_crops: int = 6,
        patch_size: int = 16,
        num_hierarchies: int = 3,
        num_target_masks: int = 4,
        masking_strategy: str = "global_only",
        base_scale: Range = (0.05, 0.15),
        aspect_ratio_range: Range = (0.75, 1.5),
        max_attempts: int = 10,
    ):
        super().__init__(
            _sides(global_crop_size),
            _sides(local_crop_size),
            num_global_crops,
            num_local_crops,
            patch_size,
            num_hierarchies,
            num_target_masks,
            masking_strategy,
            base_scale=base_scale,
            aspect_ratio_range=aspect_ratio_range,
            max_attempts=max_attempts,
        )
        self.global_crop_size, self.local_crop_size = _sides(global_crop_size), _sides(local_crop_size)
        self.patch_size, self.num_hierarchies = patch_size, num_hierarchies
        self.masking_strategy = masking_strategy
        self.global_mask_gen, self.local_mask_gen = self.global_generator, self.local_generator
        for name, (height, width) in (("global", self.global_crop_size), ("local", self.local_crop_size)):
            rows, columns = height // patch_size, width // patch_size
            setattr(self, f"{name}_num_patches_h", rows)
            setattr(self, f"{name}_num_patches_w", columns)
            setattr(self, f"{name}_num_patches", rows * columns)

    def get_crop_info(self) -> dict[str, Any]:
        """Return the strategy, and the numbers, sizes in pixels and patch counts of both kinds of crops."""
        names = ("num_global_crops", "num_local_crops", "global_crop_size", "local_crop_size")
        names += ("global_num_patches", "local_num_patches", "patch_size", "num_hierarchies", "masking_strategy")
        return {name: getattr(self, name) for name in names}

    def visualize_multicrop_masks(self, masks, sample_idx: int = 0, figsize=(20, 10), save_path=None):
        """Draw a sample's targets in every crop (2) and its context (1); return the matplotlib figure."""
        panels, sides = {}, []
        for kind, crops in masks.items():
            size = self.global_mask_gen.samplers[0] if kind == "global_masks" else self.local_mask_gen.samplers[0]
            for name, crop in crops.items():
                level = crop.get("level_0", crop)
                shown = level["context"][sample_idx].long()
                if "targets" in level:
                    shown = torch.where(level["targets"][sample_idx].any(0), 2, shown)
                panels[f"{kind} {name}"] = shown
                sides.append((size.rows, size.columns))
        return mask_pictures.grids(panels, sides, figsize, save_path)

    def __call__(self, batch_size: int, device: Any = None) -> dict:
        return to_tensors(super().__call__(batch_size), device)
