"""Checkpoint files that torch reads and writes: .pt and .safetensors."""

import pathlib
import pickle
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxtrain.errors import UserError

WEIGHT_KEYS = ("model_state_dict", "state_dict", "model")  # where the originals' checkpoints keep their weights


def save(state: Mapping[str, np.ndarray], path: str | pathlib.Path) -> pathlib.Path:
    """Write a state dict as .pt (needs torch) or .safetensors, aside first and renamed when whole."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    if path.suffix == ".safetensors":
        save_file({key: np.ascontiguousarray(value) for key, value in state.items()}, aside)
    elif path.suffix in (".pt", ".pth"):
        import torch

        from torch_bridge.datasets import to_torch

        torch.save({key: to_torch(value) for key, value in state.items()}, aside)
    else:
        raise UserError(f"{path}: unknown kind of file {path.suffix or '(none)'!r}, wanted .pt or .safetensors")
    aside.rename(path)
    return path


def load(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The state dict in a .pt or .safetensors file, as numpy arrays. Never runs code from the file.

    Raises UserError for a missing, damaged or unsafe file.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; wanted a .pt or .safetensors with weights")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{path}: not a readable safetensors file: {error}. Is it complete?") from None
    return _load_pickle(path)


def _load_pickle(path: pathlib.Path) -> dict[str, np.ndarray]:
    import torch

    from torch_bridge.datasets import to_numpy

    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: refused, it holds more than tensors and plain values: {reason}") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a readable torch file: {' '.join(str(error).split())[:200]}") from None
    for key in WEIGHT_KEYS:
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    if not isinstance(value, dict) or not all(isinstance(v, torch.Tensor) for v in value.values()):
        raise UserError(f"{path}: holds {type(value).__name__}, wanted a state dict, or a dict with {WEIGHT_KEYS[0]}")
    return {str(key): to_numpy(tensor) for key, tensor in value.items()}


def cast(state: Mapping[str, np.ndarray], precision: str | None) -> dict[str, np.ndarray]:
    """Floating weights in another precision ("fp32", "bf16", "fp16"); None keeps what they have."""
    if precision is None:
        return dict(state)
    import ml_dtypes

    dtype = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}[precision]
    floating = (np.floating, ml_dtypes.bfloat16)
    return {
        key: v.astype(dtype) if v.dtype == floating[1] or np.issubdtype(v.dtype, floating[0]) else v
        for key, v in state.items()
    }
