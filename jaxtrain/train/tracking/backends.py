"""Trackers that receive a run's metrics besides its own files: TensorBoard, Weights & Biases, MLflow.

A backend is a small class with the methods of `Backend`. If it raises, that is reported once and the backend is
switched off: no tracker stops a run.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from jaxtrain.errors import UserError, install


class Backend(Protocol):
    """Interface of a tracker. Names are "train/loss", "validation/accuracy", ...; steps are optimizer steps."""

    def start(self, step: int, config: Mapping[str, Any], text: str) -> None:
        """Start logging. step: points after it will be logged (again). config: all settings, nested; text: as YAML."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Log a histogram. counts: [bin]. edges: [bin + 1]."""

    def image(self, step: int, name: str, image: np.ndarray) -> None:
        """Log an image: float in 0..1 or uint8, [height, width, 1 or 3]."""

    def close(self, failed: bool) -> None: ...


def make_backends(config: Any, folder: pathlib.Path) -> dict[str, Callable[[], Backend]]:
    """Return constructors of the backends enabled in `tracking`, by name. Raises UserError if a package is missing."""
    tracking = config.tracking
    wanted: dict[str, Callable[[], Backend]] = {}
    if tracking.tensorboard:
        _require("tensorboardX", "tracking.tensorboard", "tensorboardX")

        def tensorboard() -> Backend:
            from jaxtrain.train.tracking.tensorboard import TensorBoard

            return TensorBoard(folder / "tensorboard")

        wanted["TensorBoard"] = tensorboard
    if tracking.wandb:
        _require("wandb", "tracking.wandb", "wandb")

        def wandb() -> Backend:
            from jaxtrain.train.tracking.wandb import WeightsAndBiases

            return WeightsAndBiases(folder, tracking.wandb_project, config.run.name or folder.name)

        wanted["W&B"] = wandb
    if tracking.mlflow:
        _require("mlflow", "tracking.mlflow", "mlflow")

        def mlflow() -> Backend:
            from jaxtrain.train.tracking.mlflow import MLflow

            name = config.run.name or folder.name
            return MLflow(folder, tracking.mlflow_uri, config.task or "jaxtrain", name, tracking.mlflow_parent)

        wanted["MLflow"] = mlflow
    return wanted


def _require(module: str, setting: str, package: str) -> None:
    if sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
        raise UserError(
            f"{setting}: true, but the package {package} is not installed; {install('tracking')}, or {setting}=false"
        )
