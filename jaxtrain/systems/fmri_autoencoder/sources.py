"""Samples of a recording: one volume of one subject, with the film, sound and text of its moment."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def split_volumes(length: int, train_ratio: float, gap: int = 0) -> dict[str, range]:
    """Split volumes by time: the first part for training, the rest for validation, `gap` volumes between unused."""
    cut = int(train_ratio * length)
    return {"train": range(cut), "validation": range(min(cut + gap, length), length)}


class ScanSource:
    """Source whose sample i is volume i % T of subject i // T, for T volumes in the split.

    stimuli: `video`, `audio`, `text`, each [volume, ...], stored once for all subjects; or one such mapping per
    subject, if they saw different things. fmri: one array [volume, voxel] per subject. times: volumes of the split.
    mean, std: [voxel] per subject, by which the voxels are standardised; None leaves them as they are.
    named: True if items hold their subject_id. frame: (height, width) of a flattened picture that items hold as
    [3, height, width] instead.
    geometry: the mask bool [x, y, z] and the affine [4, 4] that put voxels back into the brain.
    """

    def __init__(
        self,
        stimuli: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]],
        fmri: Sequence[np.ndarray],
        subject_ids: Sequence[int],
        times: range,
        *,
        mean: Sequence[np.ndarray] | None = None,
        std: Sequence[np.ndarray] | None = None,
        frame: tuple[int, int] | None = None,
        geometry: tuple[np.ndarray, np.ndarray] | None = None,
        named: bool = True,
    ):
        self.fmri, self.subject_ids, self.times = list(fmri), list(subject_ids), times
        shared = isinstance(stimuli, Mapping)
        self.stimuli = [dict(stimuli)] * len(self.fmri) if shared else [dict(columns) for columns in stimuli]
        self.mean, self.std = mean, std
        self.frame, self.geometry, self.named = frame, geometry, named

    def __len__(self) -> int:
        return len(self.subject_ids) * len(self.times)

    def __getitem__(self, index: int) -> dict[str, Any]:
        subject, position = divmod(range(len(self))[index], len(self.times))
        time = self.times[position]
        item: dict[str, Any] = {name: _computable(column[time]) for name, column in self.stimuli[subject].items()}
        if self.frame is not None:
            item["video"] = item["video"].reshape(*self.frame, 3).transpose(2, 0, 1)
        voxels = np.asarray(self.fmri[subject][time], np.float32)
        if self.mean is not None and self.std is not None:
            voxels = (voxels - self.mean[subject]) / self.std[subject]
        item |= {"fmri": voxels, "tr_index": position}
        return item | {"subject_id": self.subject_ids[subject]} if self.named else item

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays, in memory or mapped."""
        arrays = {id(array): array for columns in self.stimuli for array in columns.values()}
        return sum(array.nbytes for array in (*arrays.values(), *self.fmri))


def _computable(row: np.ndarray) -> np.ndarray:
    if np.issubdtype(row.dtype, np.floating):
        return np.asarray(row, np.float32)
    return np.asarray(row, np.int32)
