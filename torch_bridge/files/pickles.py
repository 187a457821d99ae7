"""Read and write torch's own files (.pt, .pth, .bin) one tensor at a time; reading never runs code from them."""

import errno
import os
import pathlib
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.serialization import safe_globals, skip_data

from jaxtrain.errors import UserError
from torch_bridge.lazy_array import LazyArray, as_bytes, as_leaf, is_leaf, map_leaves, read_file
from torch_bridge.state_dict import versions, with_versions

# Numbers of numpy in checkpoints (a metric, a best loss) are values, not code. `scalar` moved with numpy 2.
_SCALAR = np._core.multiarray.scalar  # pyright: ignore[reportAttributeAccessIssue]
PLAIN_VALUES = [
    _SCALAR,
    (_SCALAR, "numpy.core.multiarray.scalar"),
    np.dtype,
    *{type(np.dtype(kind)) for kind in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?")},
]


def open_file(path: pathlib.Path) -> Any:
    """Read a file as `torch.load(path, weights_only=True)` does, with a LazyArray in place of every tensor.

    Tensors of a zip file (torch >= 1.6) are read one by one on use; an older file is read at once.
    Raises UserError for a file that is damaged or holds more than tensors and plain values.
    """
    sizes = _stored_records(path)
    if sizes is None:
        return _map_tensors(_load(path), as_leaf)
    from torch._subclasses.fake_tensor import FakeTensorMode  # seconds to import

    with FakeTensorMode():
        tree = _load(path)
    return _map_tensors(tree, lambda tensor: _leaf(path, tensor, sizes))


def _load(path: pathlib.Path) -> Any:
    try:
        with safe_globals(PLAIN_VALUES), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about unusual pickles; real problems raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(_refusal(path, str(error))) from None
    except NotImplementedError as error:
        if "Quantized" not in str(error):
            raise UserError(_unreadable(path, error)) from None
        raise UserError(
            f"{path}: holds quantised tensors, wanted plain ones: where it was made, save each as value.dequantize(), "
            "or the model before it was quantised"
        ) from None
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise UserError(_unreadable(path, error)) from None


def _unreadable(path: pathlib.Path, error: Exception) -> str:
    return f"{path}: not a readable torch file: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _refusal(path: pathlib.Path, text: str) -> str:
    lines = [line.strip().removeprefix("WeightsUnpickler error: ") for line in text.splitlines()]
    reason = next((line for line in lines if "GLOBAL" in line), "")
    if not reason:
        reason = next((line for line in lines if line.startswith("Unsupported")), lines[0])
        return f"{path}: not a file of tensors and plain values: {reason[:200]}. Nothing of it was run"
    return (
        f"{path}: refused, it holds more than tensors and plain values, and reading that would run code from the file: "
        f"{reason.partition('. Please')[0].rstrip('.')[:200]}. If you trust it, open it where it was made and save its "
        "state dict alone: torch.save(checkpoint['model_state_dict'], ...)"
    )


def _stored_records(path: pathlib.Path) -> dict[int, int] | None:
    """Return {offset of its data: size in bytes} for all records of a torch zip file; None for another kind of file."""
    try:
        if not zipfile.is_zipfile(path):
            return None
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            if any(record.filename.endswith("/constants.pkl") for record in archive.infolist()):
                raise UserError(
                    f"{path}: a TorchScript archive, which holds code, wanted a state dict: where it was made, "
                    "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"
                )
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                return None
            begins = _begins(archive, file)
            return {begins[record.filename]: record.file_size for record in archive.infolist()}
    except UserError:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UserError(f"{path}: not a readable torch file: {error}. Is it complete?") from None


def _begins(archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, int]:
    """Return the offset of every record's data in an uncompressed zip file."""
    begins = {}
    for record in archive.infolist():
        file.seek(record.header_offset + 26)
        lengths = np.frombuffer(file.read(4), "<u2")
        begins[record.filename] = record.header_offset + 30 + int(lengths.sum())
    return begins


def _map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    return _map(tree, lambda value: function(value.detach()) if isinstance(value, torch.Tensor) else value)


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to all values in nested dicts, lists and tuples; state dicts keep their versions."""
    if isinstance(tree, Mapping):
        mapped = {key: _map(value, function) for key, value in tree.items()}
        return with_versions(mapped, versions(tree)) if versions(tree) else mapped
    if isinstance(tree, (list, tuple)):
        items = [_map(value, function) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


def _leaf(path: pathlib.Path, tensor: torch.Tensor, sizes: dict[int, int]) -> LazyArray:
    """Return a LazyArray for a fake tensor, whose storage has the file offset of its data (torch's notes on
    serialization)."""
    if tensor.layout is not torch.strided:
        raise UserError(f"{path}: holds a {tensor.layout} tensor, wanted dense ones: save it as tensor.to_dense()")
    try:
        dtype = as_leaf(torch.empty(0, dtype=tensor.dtype)).dtype
    except TypeError:
        raise UserError(f"{path}: holds numbers of the kind {tensor.dtype}, which is not read here") from None
    conjugated, negated = tensor.is_conj(), tensor.is_neg()  # lazy in torch: not applied to the stored data
    offset = tensor.untyped_storage()._checkpoint_offset
    size, strides = tuple(tensor.shape), tensor.stride()
    first = tensor.storage_offset()
    count = 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True)) if tensor.numel() else 0
    if offset not in sizes or (first + count) * dtype.itemsize > sizes[offset]:
        raise UserError(f"{path}: not a readable torch file: a tensor of {list(size)} reaches past its data")

    def read() -> np.ndarray:
        flat = read_file(path, dtype, count, offset + first * dtype.itemsize)
        if flat.size != count:
            raise UserError(f"{path}: ends inside a tensor; was it changed while being read?")
        if not count:
            return flat.reshape(size)
        raw = flat.view(f"V{dtype.itemsize}")  # as_strided knows numpy's own dtypes only, not float8_e5m2
        steps = [step * dtype.itemsize for step in strides]
        array = np.lib.stride_tricks.as_strided(raw, size, steps).view(dtype)
        array = np.conj(array) if conjugated else array
        return -array if negated else array

    return LazyArray(size, dtype, read, fresh=True)


def write_file(tree: Any, path: pathlib.Path) -> None:
    """Write nested dicts and lists with arrays, tensors or LazyArrays as `torch.save` does, fetching one at a time.

    The same object under two keys becomes one tensor, as tied weights are in torch.
    """
    tree = _map_tensors(tree, as_leaf)
    blank: dict[int, torch.Tensor] = {}  # memory that is allocated and never written
    placed = _map(tree, lambda leaf: blank.setdefault(id(leaf), _blank(leaf)) if is_leaf(leaf) else leaf)
    path.touch()  # raises the system's error; torch's would point into its C++ code
    try:
        with skip_data():
            torch.save(placed, path)
    except RuntimeError as error:  # torch's writer does not tell the system's error
        if not any(word in str(error) for word in ("PytorchStreamWriter", "inline_container")):
            raise
        full = shutil.disk_usage(path.parent).free < sum(leaf.nbytes for leaf in _leaves(tree)) + path.stat().st_size
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    leaves = {id(leaf): leaf for leaf in _leaves(tree)}.values()  # torch numbers its records in the order of first use
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:  # it has just been written: reading it fails
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path)) from error
    with archive, path.open("r+b") as file:
        begins = _begins(archive, file)
        folder = archive.namelist()[0].partition("/")[0]
        for number, leaf in enumerate(leaves):
            file.seek(begins[f"{folder}/data/{number}"])
            file.write(as_bytes(leaf))


def _blank(leaf: Any) -> torch.Tensor:
    return torch.empty(leaf.shape, dtype=getattr(torch, np.dtype(leaf.dtype).name))


def _leaves(tree: Any) -> list:
    found: list = []
    map_leaves(found.append, tree)
    return found
