"""Masks over the patch grid, drawn with numpy's legacy generator in the original's order.

With the same seed they equal the original's bit for bit. True = the patch belongs to the block.
"""

import numpy as np

Range = tuple[float, float]


class BlockSampler:
    """Sampler of random rectangles on a grid of rows x columns patches; areas are fractions of the grid.

    rng: a numpy RandomState; the global legacy generator (numpy.random) if left out.
    """

    def __init__(self, input_size, patch_size: int, aspect: Range, max_attempts: int, divisor: int, rng=None):
        height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
        self.rows, self.columns = height // patch_size, width // patch_size
        self.aspect, self.max_attempts, self.divisor = aspect, max_attempts, divisor
        self._rng = rng

    @property
    def rng(self):
        """Return the generator; numpy.random is looked up here because a module cannot be pickled for a worker."""
        return np.random if self._rng is None else self._rng

    def draw(self, scale: Range, occupied=None) -> np.ndarray:
        """Draw one block, bool [rows, columns], that avoids `occupied` if one of max_attempts attempts succeeds.

        Otherwise draw a fallback block of rows // divisor by columns // divisor.
        Order of draws: scale, aspect, top, left.
        """
        for _ in range(self.max_attempts):
            area = self.rng.uniform(*scale)
            aspect = self.rng.uniform(*self.aspect)
            area = area * (self.rows * self.columns)
            height = int(round(np.sqrt(area / aspect)))
            width = int(round(height * aspect))
            block = self._draw_block(min(max(height, 1), self.rows), min(max(width, 1), self.columns))
            if occupied is None or not (block & occupied).any():
                return block
        return self._draw_block(max(1, self.rows // self.divisor), max(1, self.columns // self.divisor))

    def _draw_block(self, height: int, width: int) -> np.ndarray:
        top = self.rng.randint(0, self.rows - height + 1)
        column = self.rng.randint(0, self.columns - width + 1)
        block = np.zeros((self.rows, self.columns), bool)
        block[top : top + height, column : column + width] = True
        return block

    def batch(self, size: int, num_targets: int, target_scale: Range, context_scale: Range):
        """Call `sample` for every image; return bool [size, patch] and bool [size, target, patch]."""
        patches = self.rows * self.columns
        context, targets = np.zeros((size, patches), bool), np.zeros((size, num_targets, patches), bool)
        for i in range(size):
            context[i], targets[i] = self.sample(num_targets, target_scale, context_scale)
        return context, targets

    def sample(self, num_targets: int, target_scale: Range, context_scale: Range) -> tuple[np.ndarray, np.ndarray]:
        """Return a context block minus the targets, bool [patch], and the targets, bool [target, patch]."""
        occupied = np.zeros((self.rows, self.columns), bool)
        targets = []
        for _ in range(num_targets):
            targets.append(self.draw(target_scale, occupied))
            occupied = occupied | targets[-1]
        context = self.draw(context_scale) & ~occupied
        stacked = np.stack(targets) if targets else np.zeros((0, self.rows, self.columns), bool)
        return context.reshape(-1), stacked.reshape(num_targets, self.rows * self.columns)


class MultiBlockMaskGenerator:
    """Mask generator of I-JEPA: batch size -> context bool [batch, patch] and targets bool [batch, target, patch]."""

    def __init__(
        self,
        input_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        num_target_masks: int = 4,
        target_scale: Range = (0.15, 0.2),
        context_scale: Range = (0.85, 1.0),
        aspect_ratio_range: Range = (0.75, 1.5),
        max_attempts: int = 10,
        rng=None,
    ):
        self.sampler = BlockSampler(input_size, patch_size, aspect_ratio_range, max_attempts, 4, rng)
        self.num_target_masks = num_target_masks
        self.target_scale, self.context_scale = tuple(target_scale), tuple(context_scale)

    def __call__(self, batch_size: int, device=None) -> tuple[np.ndarray, np.ndarray]:
        return self.sampler.batch(batch_size, self.num_target_masks, self.target_scale, self.context_scale)

    def get_mask_statistics(self, context, targets) -> dict[str, float]:
        return statistics(context, targets)


class HierarchicalMaskGenerator:
    """Mask generator with one block scale per hierarchy level.

    Maps a batch size to {"level_0": {"context": [batch, patch], "targets": [batch, target, patch]}, ...}. Level l
    scales its blocks by 2^l ("geometric") or 1 + l ("linear"); all levels are drawn, level by level.
    """

    def __init__(
        self,
        input_size=224,
        patch_size: int = 16,
        num_hierarchies: int = 3,
        num_target_masks: int = 4,
        scale_progression: str = "geometric",
        base_scale: Range = (0.05, 0.15),
        aspect_ratio_range: Range = (0.75, 1.5),
        max_attempts: int = 10,
        rng=None,
    ):
        if scale_progression not in ("geometric", "linear"):
            raise ValueError(f"scale_progression={scale_progression!r} is unknown; known: geometric, linear")
        self.num_target_masks = num_target_masks
        self.num_hierarchies = num_hierarchies
        self.level_configs, self.samplers = [], []
        for level in range(num_hierarchies):
            factor = 2**level if scale_progression == "geometric" else 1 + level
            ratio = 0.6 + 0.3 * level / max(1, num_hierarchies - 1)
            self.level_configs.append(
                {
                    "target_scale": tuple(min(0.95, end * factor) for end in base_scale),
                    "context_scale": (min(0.95, ratio), min(1.0, ratio + 0.15)),
                    "level": level,
                }
            )
            low, high = aspect_ratio_range
            aspect = (max(low, 0.85), min(high, 1.15)) if level == 0 else (low, high)
            self.samplers.append(BlockSampler(input_size, patch_size, aspect, max_attempts, level + 2, rng))

    def __call__(self, batch_size: int, device=None) -> dict[str, dict[str, np.ndarray]]:
        masks = {}
        for config, sampler in zip(self.level_configs, self.samplers, strict=True):
            scales = config["target_scale"], config["context_scale"]
            context, targets = sampler.batch(batch_size, self.num_target_masks, *scales)
            masks[f"level_{config['level']}"] = {"context": context, "targets": targets}
        return masks

    def get_mask_statistics(self, masks) -> dict[str, dict[str, float]]:
        return {level: statistics(mask["context"], mask["targets"]) for level, mask in masks.items()}


class MultiCropMaskGenerator:
    """Mask generator for global and local crops: {"global_masks": {"crop_0": ...}, "local_masks": {...}}.

    Strategies: global_only masks the global crops; global_with_local_context adds all-True contexts for local crops;
    cross_crop_prediction masks the first half of the local crops too and leaves the others whole.
    """

    STRATEGIES = ("global_only", "global_with_local_context", "cross_crop_prediction")

    def __init__(
        self,
        global_crop_size=224,
        local_crop_size=96,
        num_global_crops: int = 2,
        num_local_crops: int = 6,
        patch_size: int = 16,
        num_hierarchies: int = 3,
        num_target_masks: int = 4,
        masking_strategy: str = "global_only",
        rng=None,
        **options,
    ):
        if masking_strategy not in self.STRATEGIES:
            raise ValueError(f"masking_strategy={masking_strategy!r} is unknown; known: {', '.join(self.STRATEGIES)}")
        self.strategy = masking_strategy
        self.num_global_crops, self.num_local_crops = num_global_crops, num_local_crops
        self.num_target_masks = num_target_masks
        build: dict = dict(
            patch_size=patch_size,
            num_hierarchies=num_hierarchies,
            num_target_masks=num_target_masks,
            rng=rng,
            **options,
        )
        self.global_generator = HierarchicalMaskGenerator(global_crop_size, **build)
        self.local_generator = HierarchicalMaskGenerator(local_crop_size, **build)

    def __call__(self, batch_size: int, device=None) -> dict:
        crops = {f"crop_{i}": self.global_generator(batch_size) for i in range(self.num_global_crops)}
        if self.strategy == "global_only":
            return {"global_masks": crops}
        local = {f"crop_{i}": self._local(i, batch_size) for i in range(self.num_local_crops)}
        return {"global_masks": crops, "local_masks": local}

    def _local(self, crop: int, batch_size: int) -> dict:
        sampler = self.local_generator.samplers[0]
        whole = np.ones((batch_size, sampler.rows * sampler.columns), bool)
        if self.strategy == "global_with_local_context":
            return {"context": whole}
        if crop < self.num_local_crops // 2:
            return self.local_generator(batch_size)
        targets = np.zeros((batch_size, self.num_target_masks, whole.shape[1]), bool)
        return {"level_0": {"context": whole, "targets": targets}}


def statistics(context: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return means and unbiased standard deviations of the covered fraction, and the context's overlap with targets."""
    patches = context.shape[1]
    context_cover = context.sum(1) / patches
    target_cover = targets.sum(2) / patches
    overlap = (targets & context[:, None]).sum(2) / patches
    return {
        "context_coverage_mean": float(context_cover.mean()),
        "context_coverage_std": _deviation(context_cover),
        "target_coverage_mean": float(target_cover.mean()),
        "target_coverage_std": _deviation(target_cover),
        "overlap_mean": float(overlap.mean()),
        "overlap_max": float(overlap.max()),
    }


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if values.size > 1 else float("nan")


def training_mask(masks: dict) -> np.ndarray:
    """Return the mask that training uses: the union of level 0's targets, bool [batch, patch], True = predict."""
    return masks["level_0"]["targets"].any(1)
