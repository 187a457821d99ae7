"""Read and write torch's checkpoint files: .pt, .safetensors, Hugging Face folders. Reading never runs code from a
file."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError, file_sentence
from torch_bridge.atomic_file import replacing
from torch_bridge.files import safetensors
from torch_bridge.lazy_array import LazyArray, as_leaf, is_leaf, map_leaves

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
SHARD_BYTES = 5_000_000_000  # largest weight file in a Hugging Face folder


def save(state: Mapping[str, Any], path: str | pathlib.Path, follow: bool = True) -> pathlib.Path:
    """Write a state dict as .pt (needs torch) or .safetensors, to a temporary file that is renamed when complete.

    Args:
        state: arrays, torch tensors or LazyArrays; .pt takes nested dicts and lists of them, with plain values.
        path: the file; its ending says which kind.
        follow: if the path is a link, write the file that it points to; False replaces the link, for folders that may
            be from elsewhere.

    Raises:
        UserError: for values that the file format cannot hold, and if the file cannot be written.

    Examples:
        >>> import numpy as np
        >>> from torch_bridge import files
        >>> path = files.save({"weight": np.ones((2, 3))}, "weights.safetensors")
        >>> files.load(path)["weight"].shape
        (2, 3)
    """
    path = pathlib.Path(path)
    place = path.resolve() if follow and path.is_symlink() else path
    if path.suffix == ".safetensors":
        tensors = _tensors(state, path)
        _aside(place, lambda aside: safetensors.write_file(tensors, aside))
        return path
    if path.suffix in PICKLES:
        from torch_bridge.files import pickles

        _aside(place, lambda aside: pickles.write_file(state, aside))
        return path
    raise UserError(f"{path}: unknown kind of file {path.suffix or '(none)'!r}, wanted .pt or .safetensors")


def _tensors(state: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Return the state as arrays and LazyArrays. Raises UserError for values that a safetensors file cannot hold."""
    leaves = {key: as_leaf(value) if hasattr(value, "dtype") else value for key, value in state.items()}
    for key, leaf in leaves.items():
        kind = str(leaf.dtype) if is_leaf(leaf) else type(leaf).__name__
        if not is_leaf(leaf) or leaf.dtype not in safetensors.NAMES:
            raise UserError(
                f"{path}: {key} is {kind}, wanted tensors of a kind that safetensors has; leave it out, or save a .pt"
            )
    return leaves


def save_folder(state: Mapping[str, Any], config: Mapping[str, Any], folder: str | pathlib.Path) -> pathlib.Path:
    """Write a folder for transformers' from_pretrained, the weights in shards of 5 GB with an index.

    Args:
        state: arrays, torch tensors or LazyArrays by transformers' names.
        config: the content of config.json.
        folder: where to.
    """
    folder = pathlib.Path(folder)
    _aside(folder / "config.json", lambda aside: aside.write_text(json.dumps(dict(config), indent=2) + "\n"))
    shards: list[dict[str, Any]] = [{}]
    room = SHARD_BYTES
    for key, value in state.items():
        room -= value.nbytes
        if room < 0 and shards[-1]:
            shards.append({})
            room = SHARD_BYTES - value.nbytes
        shards[-1][key] = value
    if len(shards) == 1:
        save(shards[0], folder / "model.safetensors")
        return folder
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": sum(value.nbytes for value in state.values())}, "weight_map": weight_map}
    _aside(folder / "model.safetensors.index.json", lambda aside: aside.write_text(json.dumps(index, indent=1)))
    return folder


def _aside(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    try:
        with replacing(path) as aside:
            write(aside)
    except OSError as error:
        raise UserError(f"cannot write {file_sentence(error, path)}") from None


def load(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Return the state dict in a file or Hugging Face folder as numpy arrays. `open_weights` reads one at a time.

    Args:
        path: a .pt, a .safetensors or a folder.
    """
    return {key: np.asarray(leaf) for key, leaf in open_weights(path).items()}


def open_weights(path: str | pathlib.Path) -> dict[str, LazyArray]:
    """Return the state dict of a file or folder as LazyArrays, which are read on use.

    Args:
        path: a .pt, a .safetensors or a Hugging Face folder. From a training loop's checkpoint dict, the weights are
            taken (checkpoint.WEIGHT_KEYS).

    Raises:
        UserError: for a missing, damaged or unsafe file.
    """
    from torch_bridge.files import checkpoint

    path = pathlib.Path(path)
    if path.is_dir():
        return _open_folder(path)
    return checkpoint.weights(read(path), path)


def read(path: pathlib.Path) -> Any:
    """Return the content of a file, with LazyArrays in place of tensors. Raises UserError as `open_weights`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; wanted a .pt, a .safetensors or a folder with weights")
    if path.name.endswith(INDEX):
        return _open_sharded(path.parent, path.name)
    if _is_safetensors(path):
        try:
            return safetensors.open_file(path)
        except safetensors.UnknownKind as error:
            raise UserError(f"{path}: {error}") from None
        except (safetensors.Damaged, OSError) as error:
            raise UserError(f"{path}: not a readable safetensors file: {error}. Is it complete?") from None
    from torch_bridge.files import pickles

    return pickles.open_file(path)


def _is_safetensors(path: pathlib.Path) -> bool:
    """Return True for a safetensors file, judged by its first bytes, else by its name. Raises UserError for a torch
    file with a safetensors name."""
    named = path.suffix == ".safetensors"
    try:
        with path.open("rb") as file:
            first = file.read(9)
    except OSError:
        return named
    if first[8:] == b"{":  # after the length of the header, any eight bytes
        return True
    if named and first.startswith((b"PK\x03\x04", b"\x80")):
        raise UserError(f"{path}: is a file of torch.save under a safetensors name; rename it to {path.stem}.pt")
    return named


INDEX = ".index.json"  # how the name of a sharded model's index file ends
FOLDER_FILES = (  # tried in this order: model.pt has tied weights under both names, model.safetensors under one
    "model.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


def _open_folder(folder: pathlib.Path) -> dict[str, LazyArray]:
    for name in FOLDER_FILES:
        if (folder / name).is_file():
            return _open_sharded(folder, name) if name.endswith(".json") else open_weights(folder / name)
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise UserError(f"{folder}: holds no weights; wanted one of {', '.join(FOLDER_FILES)}, found {found}")


def _open_sharded(folder: pathlib.Path, name: str) -> dict[str, LazyArray]:
    index = folder / name
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
        plain = all(isinstance(file, str) and pathlib.Path(file).name == file for file in files)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{index}: not a readable index: {type(error).__name__}: {error}") from None
    if not plain:
        raise UserError(f"{index}: a shard's name leads out of the folder; wanted plain file names, got {files[:4]}")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise UserError(f"{folder}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:4])}")
    shards = {file: open_weights(folder / file) for file in files}
    absent = [key for key, file in weight_map.items() if key not in shards[file]]
    if absent:
        raise UserError(f"{index}: {absent[0]} is not in {weight_map[absent[0]]} ({len(absent)} such keys)")
    return {key: shards[file][key] for key, file in weight_map.items()}


def cast(state: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    """Convert floating-point weights to another precision ("fp32", "bf16", "fp16"); None keeps the present one."""
    if precision is None:
        return dict(state)
    dtype = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}[precision]
    floating = lambda leaf: leaf.dtype == ml_dtypes.bfloat16 or np.issubdtype(leaf.dtype, np.floating)
    converted: dict[int, Any] = {}  # tied weights stay one object
    change = lambda leaf: converted.setdefault(id(leaf), leaf.astype(dtype) if floating(leaf) else leaf)
    return map_leaves(change, {key: as_leaf(value) for key, value in state.items()})
