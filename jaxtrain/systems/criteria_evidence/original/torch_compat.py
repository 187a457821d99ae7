"""Functions of the torch original under its names, for scripts that change only their imports."""

import json
import logging
import os
import pathlib
import random
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.systems.criteria_evidence.csv_files import criterion_map


def set_seed(
    seed: int = 42, deterministic: bool = True, env_var: str | None = None, *, cudnn_benchmark: bool = False
) -> int:
    """Seed python, numpy and torch, and set torch's determinism as the original does; return the seed.

    A jaxtrain run does not need it (its randomness is a function of config.seed), but your own torch code may. env_var:
    name of an environment variable whose number overrides `seed`.
    """
    seed = int(os.environ.get(env_var, seed)) if env_var else seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
    os.environ["PYTHONHASHSEED"] = str(seed)
    try:
        torch.use_deterministic_algorithms(deterministic)
    except Exception:  # as in the original; builds of torch raise different errors
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    return seed


def get_device(prefer_cuda: bool = True, device_id: int = 0) -> torch.device:
    """Return cuda:device_id if CUDA is available, else the CPU; print its memory, compute capability, CUDA version, and
    TF32 and bfloat16 support. `python -m jaxtrain.doctor` shows JAX's devices."""
    if not (prefer_cuda and torch.cuda.is_available()):
        print("Using device: cpu")
        return torch.device("cpu")
    device = torch.device(f"cuda:{device_id}")
    major, minor = torch.cuda.get_device_capability(device)
    print(f"Using device: {device} ({torch.cuda.get_device_name(device)})")
    print(f"CUDA version: {torch.version.cuda}")
    print(f"GPU memory: {torch.cuda.get_device_properties(device).total_memory / 1e9:.2f} GB")
    print(f"Compute capability: {major}.{minor}")
    if major >= 8:
        print("TF32 and BFloat16 are supported")
    return device


def print_system_info() -> dict[str, str]:
    """Print the versions of Python, torch and CUDA and the names of the GPUs; return them as a dict."""
    import platform

    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for i in range(torch.cuda.device_count()):
        versions[f"gpu {i}"] = torch.cuda.get_device_name(i)
    for name, value in versions.items():
        print(f"{name}: {value}")
    return versions


def compute_total_steps(num_batches: int, gradient_accumulation_steps: int, num_epochs: int) -> int:
    """Return the number of optimizer steps of a run; an incomplete last group counts; 0 for 0 batches."""
    return -(-num_batches // max(gradient_accumulation_steps, 1)) * max(num_epochs, 1) if num_batches else 0


def criterion_texts(entries: list[Mapping[str, Any]]) -> dict[str, str]:
    """Return criterion texts by id as written, in upper case and in lower case."""
    return criterion_map(entries)


def get_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
    """Return a logger of that level that prints time, level, name and message; without a name, the root logger."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger


def ensure_directory(path: str | pathlib.Path) -> pathlib.Path:
    """Make a folder with its parents, if it is not there; return it."""
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def prune_directory_except(path: str | pathlib.Path, keep_filenames: Iterable[str]) -> None:
    """Delete what lies in a folder except entries of these names; a folder that is not there is left alone."""
    path, spared = pathlib.Path(path), set(keep_filenames)
    for entry in path.iterdir() if path.is_dir() else ():
        if entry.name not in spared:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def archive_trial_summary(
    destination: str | pathlib.Path,
    trial_number: int,
    params: Mapping[str, Any],
    metrics: Mapping[str, Any],
    extra_attrs: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Write a trial's number, parameters, metrics and further attributes as JSON; return the file.

    destination: a file, or a folder, which gets trial_<number>.json.
    """
    path = pathlib.Path(destination)
    path = path if path.suffix else path / f"trial_{trial_number}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"trial_number": trial_number, "params": dict(params), "metrics": dict(metrics)}
    path.write_text(json.dumps({**content, **(extra_attrs or {})}, indent=2, default=str), encoding="utf-8")
    return path
