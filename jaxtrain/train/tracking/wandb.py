"""Log to Weights & Biases; WANDB_MODE=offline keeps everything in the run folder."""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import wandb


class WeightsAndBiases:
    """W&B backend. Each run folder has one W&B run, which a resumed run continues."""

    def __init__(self, folder: pathlib.Path, project: str, name: str):
        self.folder, self.project, self.name = folder, project, name
        self._run: Any = None

    def start(self, step: int, config: Mapping[str, Any], text: str) -> None:
        identity = hashlib.sha256(str(self.folder.absolute()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=self.project,
            name=self.name,
            id=identity,
            dir=str(self.folder),
            config=dict(config),
            resume="allow",
            settings=wandb.Settings(silent=True),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._run.log({name: wandb.Histogram(np_histogram=(counts, edges))}, step=step)

    def image(self, step: int, name: str, image: np.ndarray) -> None:
        self._run.log({name: wandb.Image(image)}, step=step)

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
