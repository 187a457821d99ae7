"""Names that users of the torch original know, for scripts that change their imports only."""

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.systems.criteria_evidence.csv_files import criterion_map


def set_seed(
    seed: int = 42, deterministic: bool = True, cudnn_benchmark: bool = False, env_var: str | None = None
) -> int:
    """Seed python, numpy and torch, and set torch's determinism as the original does. Gives the seed back.

    A jaxtrain run needs none of it (its randomness is a function of config.seed); torch code beside it may. env_var: a
    variable of the environment whose number wins over `seed`.
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
    except Exception:  # as in the original, whatever a build of torch raises
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    return seed


def get_device(prefer_cuda: bool = True, device_id: int = 0) -> torch.device:
    """cuda:device_id where there is one, else the CPU; prints what it offers: memory, compute capability, TF32,
    bfloat16, CUDA version. `python -m jaxtrain.doctor` tells what JAX has."""
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
    """Print versions of Python, torch, CUDA and the GPUs; gives them as a dict."""
    import platform

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for i in range(torch.cuda.device_count()):
        found[f"gpu {i}"] = torch.cuda.get_device_name(i)
    for name, value in found.items():
        print(f"{name}: {value}")
    return found


def compute_total_steps(num_batches: int, gradient_accumulation_steps: int, num_epochs: int) -> int:
    """Optimizer steps of a run: a last, incomplete group counts; 0 batches give 0."""
    return -(-num_batches // max(gradient_accumulation_steps, 1)) * max(num_epochs, 1) if num_batches else 0


def criterion_texts(entries: list[Mapping[str, Any]]) -> dict[str, str]:
    """Criterion texts by id, in any capitals."""
    return criterion_map(entries)
