"""Conversion of fMRI volumes to the voxels that carry signal, [time, voxel]."""

import math
from collections.abc import Iterable

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.extras import require

MASK_VOLUMES = 200  # the mask is computed from the first volumes
MASK_PERCENTILE = 10.0
MASK_AGREEMENT = 0.5  # share of the subjects that must keep a voxel
FILE_NAME = "sherlock_movie_s{}.nii.gz"


def open_volume(path):
    """Return the NIfTI image [x, y, z, time], which is read when indexed. Raises UserError for other axes."""
    image = require("nibabel", "to read NIfTI volumes").load(path)
    if len(image.shape) != 4:
        raise UserError(f"{path} has the shape {image.shape}, wanted [x, y, z, time]")
    return image


def scan_mask(volume: np.ndarray) -> np.ndarray:
    """Return voxels whose spread over time exceeds the 10th percentile of all that vary, bool [x, y, z]."""
    spread = volume[..., :MASK_VOLUMES].std(-1)
    varying = spread[spread > 0]
    return spread > (np.percentile(varying, MASK_PERCENTILE) if varying.size else 0)


def shared_mask(masks: Iterable[np.ndarray], agreement: float = MASK_AGREEMENT) -> np.ndarray:
    """Return the voxels that at least a share of the subjects keep (rounded up). Raises UserError if grids differ."""
    masks = list(masks)
    shapes = {mask.shape for mask in masks}
    if len(shapes) > 1:
        raise UserError(f"the subjects' volumes have different grids: {sorted(shapes)}; resample them to one space")
    return sum(mask.astype(int) for mask in masks) >= math.ceil(len(masks) * agreement)


def voxels(volume: np.ndarray, mask: np.ndarray, at_most: int | None = None) -> np.ndarray:
    """Return the first `at_most` volumes as float32 [time, voxel], with voxels in C order of the mask."""
    return np.ascontiguousarray(volume[mask][:, :at_most].T, np.float32)


def mean_and_std(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and std of each voxel over time, float32 [voxel]; a constant voxel gets std 1."""
    mean, std = features.mean(0, dtype=np.float64), features.std(0, dtype=np.float64)
    return mean.astype(np.float32), np.where(std == 0, 1, std).astype(np.float32)


def to_volume(values: np.ndarray, mask: np.ndarray, fill: float = 0.0) -> np.ndarray:
    """Put values [..., voxel] back onto the grid: float32 [x, y, z, ...]."""
    grid = np.full((*mask.shape, *values.shape[:-1]), fill, np.float32)
    grid[mask] = np.moveaxis(values, -1, 0)
    return grid
