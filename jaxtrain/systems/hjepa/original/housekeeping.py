"""The original's small functions around a run: logging, space on disk, one checkpoint file."""

import logging
import os
import pathlib
import shutil
import sys
from typing import Any

import torch

GB = 1024**3


def setup_logging(log_file: str | os.PathLike | None = None, level: int = logging.INFO) -> None:
    """Print log lines with time, name and level, and write them to log_file too; replaces earlier handlers."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if log_file is not None:
        pathlib.Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file))
    form = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
    logging.basicConfig(level=level, format=form, handlers=handlers, force=True)


def get_disk_usage(path: str | os.PathLike) -> dict[str, float]:
    """Return total, used and free space of the disk that holds a path, in GB."""
    usage = shutil.disk_usage(_existing(path))
    return {"total": usage.total / GB, "used": usage.used / GB, "free": usage.free / GB}


def check_disk_space(data_path: str | os.PathLike, required_gb: float, buffer_gb: float = 5.0) -> bool:
    """Return True if the disk that holds data_path has required_gb and buffer_gb of free space."""
    return get_disk_usage(data_path)["free"] >= required_gb + buffer_gb


def _existing(path: str | os.PathLike) -> pathlib.Path:
    path = pathlib.Path(path).absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def is_mps_available() -> bool:
    """Return True if torch has an Apple GPU."""
    return torch.backends.mps.is_available()


def save_checkpoint(filepath: str | os.PathLike, model: Any, optimizer: Any, epoch: int, **kwargs: Any) -> None:
    """Write model_state_dict, optimizer_state_dict and epoch to a file, which `load_checkpoint` reads.

    kwargs: further entries. Creates parent folders.
    """
    path = pathlib.Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"epoch": epoch, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save({**state, **kwargs}, path)
