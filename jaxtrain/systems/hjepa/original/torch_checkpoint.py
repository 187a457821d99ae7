"""The original's `.pth` checkpoints, with the names, contents and retention rules of its CheckpointManager."""

import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.state_dict import PREFIXES, convert_ddp_state, load_state_dict, state_dict


def read_checkpoint(path: str | pathlib.Path) -> dict[str, Any]:
    """Read a checkpoint, with tensors as numpy arrays and without DDP and torch.compile prefixes in the weights' keys.

    Checkpoints that hold numpy scalars load too (torch >= 2.6 refuses them by default); nothing else is unpickled.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    scalar = np._core.multiarray.scalar  # pyright: ignore[reportAttributeAccessIssue]
    allowed = [scalar, np.dtype, *{type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "?")}]
    allowed.append((scalar, "numpy.core.multiarray.scalar"))  # its name before numpy 2
    with torch.serialization.safe_globals(allowed):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"{path}: cannot be read as a torch checkpoint: {str(error).splitlines()[0]}") from None
    content = to_numpy(content)
    state = content.get("model_state_dict") if isinstance(content, dict) else None
    if state and all(key.startswith(PREFIXES) for key in state):
        content["model_state_dict"] = convert_ddp_state(state)
    return content


class CheckpointManager:
    """Writer of `checkpoint_epoch_%04d.pth`, `checkpoint_latest.pth` and `checkpoint_best.pth` that keeps the best N.

    File names and contents are the original's, so its scripts and this class read each other's files. Unlike the
    original, it stores `config` if given, so that evaluation can rebuild the model.
    """

    def __init__(
        self,
        checkpoint_dir,
        keep_best_n: int = 3,
        save_frequency: int = 10,
        metric_name: str = "val_loss",
        mode: str = "min",
    ):
        if mode not in ("min", "max"):
            raise UserError(f"mode={mode!r} is unknown; known: min, max")
        self.checkpoint_dir = pathlib.Path(checkpoint_dir)
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        self.keep_best_n, self.save_frequency = keep_best_n, save_frequency
        self.metric_name, self.mode = metric_name, mode
        self.best_metric = float("inf") if mode == "min" else float("-inf")
        self.best_checkpoints: list[tuple[pathlib.Path, int, float]] = []

    def should_save(self, epoch: int) -> bool:
        return (epoch + 1) % self.save_frequency == 0

    def is_better_metric(self, metric_value: float) -> bool:
        """Return True for a metric strictly better than the best so far."""
        return metric_value < self.best_metric if self.mode == "min" else metric_value > self.best_metric

    def update_best_metric(self, metric_value: float) -> bool:
        """Return True if `metric_value` is the best so far, and remember it."""
        better = self.is_better_metric(metric_value)
        if better:
            self.best_metric = float(metric_value)
        return better

    def save_checkpoint(
        self,
        epoch: int,
        model,
        optimizer=None,
        scheduler=None,
        scaler=None,
        metrics: dict[str, float] | None = None,
        extra_state: dict | None = None,
        is_best: bool = False,
        *,
        config: Mapping | None = None,
    ) -> pathlib.Path:
        """Write a checkpoint and return its path.

        model: an object with a state_dict() (a torch module, maybe in DataParallel), this system's model, or a state
        dict.
        scheduler: an object whose state_dict() is a dict, or a dict of values; anything else is not stored.
        extra_state: further entries. Numpy numbers become Python's and paths become text, so that torch.load accepts
        them with weights_only=True.
        """
        content: dict[str, Any] = {
            "epoch": epoch,
            "model_state_dict": _state_of(model),
            "optimizer_state_dict": optimizer.state_dict() if optimizer is not None else None,
            "scheduler_state_dict": _plain(_schedule_of(scheduler)),
            "metrics": {key: _measured(value) for key, value in (metrics or {}).items()},
            "best_metric": float(self.best_metric),
        }
        if scaler is not None:
            content["scaler_state_dict"] = scaler.state_dict()
        if config is not None:
            content["config"] = _plain_config(config)
        path = self.checkpoint_dir / f"checkpoint_epoch_{epoch:04d}.pth"
        torch.save(content | _plain(dict(extra_state or {})), path)
        shutil.copyfile(path, self.checkpoint_dir / "checkpoint_latest.pth")
        if is_best:
            shutil.copyfile(path, self.checkpoint_dir / "checkpoint_best.pth")
            self._keep_best(path, epoch, content["metrics"])
        return path

    def _keep_best(self, path: pathlib.Path, epoch: int, metrics: dict[str, float]) -> None:
        if self.metric_name not in metrics:
            return
        self.best_checkpoints.append((path, epoch, metrics[self.metric_name]))
        self.best_checkpoints.sort(key=lambda entry: entry[2], reverse=self.mode == "max")
        for old, _, _ in self.best_checkpoints[self.keep_best_n :]:
            old.unlink(missing_ok=True)
        self.best_checkpoints = self.best_checkpoints[: self.keep_best_n]

    def load_checkpoint(
        self,
        checkpoint_path,
        model=None,
        optimizer=None,
        scheduler=None,
        scaler=None,
        device="cuda",
        *,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Load a checkpoint into the given objects, each with a load_state_dict() (or this system's model).

        Returns epoch, metrics, best_metric and the other entries, with arrays as tensors. device: move a torch module
        there; the CPU where torch lacks it; None leaves the module where it is. Raises FileNotFoundError if the file is
        missing.
        """
        content = read_checkpoint(checkpoint_path)
        state = content.pop("model_state_dict")
        content = {"metrics": {}, "best_metric": self.best_metric} | _to_tensors(content)
        if hasattr(model, "load_state_dict"):
            _unwrapped(model).load_state_dict(_to_tensors(state), strict=strict)
            if device is not None and isinstance(model, torch.nn.Module):
                model.to(available(device))
        elif model is not None:
            load_state_dict(model, state)
        parts = (
            (optimizer, "optimizer_state_dict"),
            (scheduler, "scheduler_state_dict"),
            (scaler, "scaler_state_dict"),
        )
        for target, key in parts:
            if hasattr(target, "load_state_dict") and content.get(key) is not None:
                target.load_state_dict(content[key])
        if content["best_metric"] is not None:
            self.best_metric = float(content["best_metric"])
        return content

    def get_latest_checkpoint(self) -> pathlib.Path | None:
        latest = self.checkpoint_dir / "checkpoint_latest.pth"
        return latest if latest.exists() else next(iter(reversed(self._epoch_files())), None)

    def get_best_checkpoint(self) -> pathlib.Path | None:
        best = self.checkpoint_dir / "checkpoint_best.pth"
        return best if best.exists() else None

    def cleanup_old_checkpoints(self, keep_last_n: int = 5) -> None:
        """Remove epoch files older than the last keep_last_n, except those among the best."""
        files = self._epoch_files()
        best = {path for path, _, _ in self.best_checkpoints}
        for path in files[: max(0, len(files) - keep_last_n)]:
            if path not in best:
                path.unlink()

    def _epoch_files(self) -> list[pathlib.Path]:
        return sorted(self.checkpoint_dir.glob("checkpoint_epoch_*.pth"))


def available(device: Any) -> Any:
    """Return the device, or the CPU if torch has no CUDA: the originals' scripts say "cuda" everywhere."""
    return "cpu" if torch.device(device).type == "cuda" and not torch.cuda.is_available() else device


def _unwrapped(model: Any) -> Any:
    """Return the module inside DataParallel, DistributedDataParallel or torch.compile, found by its key prefix."""
    if not isinstance(model, torch.nn.Module):
        return getattr(model, "module", model)
    keys = list(model.state_dict())
    for prefix in PREFIXES:
        if keys and all(key.startswith(prefix) for key in keys):
            return _unwrapped(getattr(model, prefix.removesuffix(".")))
    return model


def _state_of(model: Any) -> Any:
    if isinstance(model, dict):
        return {key: value if isinstance(value, torch.Tensor) else to_torch(value) for key, value in model.items()}
    if hasattr(model, "state_dict"):
        return _unwrapped(model).state_dict()
    return {key: to_torch(value) for key, value in state_dict(model).items()}


def _schedule_of(scheduler: Any) -> Any:
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else scheduler
    return state if isinstance(state, dict) else None


def _measured(value: Any) -> Any:
    """Return a metric; a tensor or array of one number becomes that number."""
    return value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else _plain(value)


def _plain(value: Any) -> Any:
    if type(value) is dict:
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


def _plain_config(config: Any) -> Any:
    """Return a config as dicts, lists and values that torch.load accepts without trust; other objects as their text."""
    if isinstance(config, Mapping):
        return {key: _plain_config(inner) for key, inner in config.items()}
    if isinstance(config, Sequence) and not isinstance(config, (str, bytes)):
        return [_plain_config(inner) for inner in config]
    plain = _plain(config)
    known = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.device, torch.dtype)
    return plain if isinstance(plain, known) else str(plain)


def _to_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_tensors(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_tensors(inner) for inner in value]
    return to_torch(value) if isinstance(value, np.ndarray) else value
