"""TensorBoard event files, through tensorboardX."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter


class TensorBoard:
    """Scalars, images, histograms and the config as text, in `folder`."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._writer: SummaryWriter | None = None

    def start(self, step: int, config: Mapping[str, Any], text: str) -> None:
        # Points that a killed process wrote after its last checkpoint are replaced.
        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)
        self._writer.add_text("config", "```yaml\n" + text + "\n```", step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        centres = (edges[1:] + edges[:-1]) / 2
        self._writer.add_histogram_raw(
            name,
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float(counts @ centres),
            sum_squares=float(counts @ centres**2),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def image(self, step: int, name: str, image: np.ndarray) -> None:
        self._writer.add_image(name, image, step, dataformats="HWC")

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
