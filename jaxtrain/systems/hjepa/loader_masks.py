"""Masks drawn with numpy while a sample is read, in the original's order of draws."""

import dataclasses
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.nn.vit import overrides, vit_size
from jaxtrain.systems.hjepa import device_masks
from jaxtrain.systems.hjepa.original.masks import (
    HierarchicalMaskGenerator,
    MultiBlockMaskGenerator,
    MultiCropMaskGenerator,
    training_mask,
)
from jaxtrain.systems.hjepa.views import local_size


@dataclasses.dataclass(frozen=True)
class WithMasks:
    """A source whose items gain "mask", bool [patch], or with several crops bool [crop, patch] and "mask_local".

    crops: whether items have several crops. Seeded by (seed, epoch, sample). With `masking.kind: fixed` each mask is
    trimmed or filled to one count.
    """

    source: Any
    config: Any
    crops: bool

    def __post_init__(self):
        if self.crops and self.config.masking.generator != "hierarchical":
            raise UserError(
                f"masking.generator: {self.config.masking.generator} draws no masks of several crops in the loader; "
                "set masking.where=device, or masking.generator=hierarchical"
            )

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict:
        rng = np.random.RandomState(
            np.random.SeedSequence([self.config.seed, getattr(index, "epoch", 0), int(index)]).generate_state(4)
        )
        if self.crops:
            masks = {name: self._counted(drawn, rng) for name, drawn in self._multi_crop(rng).items()}
        else:
            masks = {"mask": self._counted(self._single(rng), rng)[0]}
        return self.source[index] | masks

    def _counted(self, masks: np.ndarray, rng) -> np.ndarray:
        """masks: bool [crop, patch]."""
        masking = self.config.masking
        if masking.kind != "fixed":
            return masks
        grid = round(masks.shape[1] ** 0.5)
        count = device_masks.fixed_count(grid, device_masks.blocks_of(masking), masking.ratio)
        order = 2 * masks + rng.uniform(size=masks.shape)
        fixed = np.zeros(masks.shape, bool)
        np.put_along_axis(fixed, np.argsort(-order, axis=1)[:, :count], True, axis=1)
        return fixed

    def _sizes(self, side: int) -> dict:
        patch = self._patch()
        return {"input_size": side // patch * patch, "patch_size": patch}

    def _patch(self) -> int:
        return vit_size(self.config.model.encoder_type, **overrides(self.config.model.vit)).patch_size

    def _single(self, rng) -> np.ndarray:
        """The union of an image's targets, bool [1, patch]."""
        masking, sizes = self.config.masking, self._sizes(self.config.data.image_size)
        common = {"num_target_masks": masking.num_masks, "aspect_ratio_range": masking.aspect_ratio, "rng": rng}
        if masking.generator == "multi_block":
            _, targets = MultiBlockMaskGenerator(**sizes, **common, target_scale=masking.mask_scale)(1)
            return targets.any(1)
        return training_mask(
            HierarchicalMaskGenerator(**sizes, **common, num_hierarchies=1, base_scale=masking.mask_scale)(1)
        )

    def _multi_crop(self, rng) -> dict[str, np.ndarray]:
        """Masks of the global and of the local crops, bool [crop, patch] each. Of its local crops the original masks
        the first half under "cross_crop_prediction", so it is asked for twice as many."""
        masking, augmentation = self.config.masking, self.config.data.augmentation
        drawn = MultiCropMaskGenerator(
            self._sizes(self.config.data.image_size)["input_size"],
            self._sizes(local_size(self.config))["input_size"],
            augmentation.global_crops,
            2 * augmentation.local_crops,
            self._patch(),
            self.config.model.num_hierarchies,
            masking.num_masks,
            "cross_crop_prediction",
            base_scale=masking.mask_scale,
            aspect_ratio_range=masking.aspect_ratio,
            rng=rng,
        )(1)
        local = [drawn["local_masks"][f"crop_{i}"] for i in range(augmentation.local_crops)]
        found = {"mask": drawn["global_masks"].values()} | ({"mask_local": local} if local else {})
        return {name: np.concatenate([training_mask(crop) for crop in crops]) for name, crops in found.items()}
