"""Read and write safetensors files one tensor at a time; neither the file nor a copy of it is held in memory.

The `safetensors` package maps the file or reads all tensors at once; both count against a job's memory limit.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from torch_bridge.lazy_array import LazyArray, as_bytes, read_file

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz, "C64": np.complex64,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
PACKED = ("F4", "F6_E2M3", "F6_E3M2")  # dtypes of the format with several numbers in a byte
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


class Damaged(ValueError):
    """Raised for a file that breaks the format's rules."""


class UnknownKind(ValueError):
    """Raised for a file with a dtype that is not supported here."""


def open_file(path: pathlib.Path) -> dict[str, LazyArray]:
    """Return every tensor as a LazyArray, in the order of the header. Raises Damaged or UnknownKind."""
    header, start, size = _header(path)
    entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
    expected = 0
    leaves = {}
    for key, entry in entries:
        dtype, shape, (first, last) = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"]), entry["data_offsets"]
        if first != expected or last - first != math.prod(shape) * dtype.itemsize:
            raise Damaged(f"{key}: its {last - first} bytes at {first} do not fit {entry['dtype']} {list(shape)}")
        leaves[key] = LazyArray(shape, dtype, _reader(path, shape, dtype, start + first), fresh=True)
        expected = last
    if start + expected != size:
        raise Damaged(f"it has {size} bytes, its header announces {start + expected}")
    return {key: leaves[key] for key in header}


def _header(path: pathlib.Path) -> tuple[dict[str, Any], int, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, LARGEST_HEADER):
            raise Damaged(f"its header is cut off ({size} bytes in all)")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise Damaged(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise Damaged("its header is no mapping")
    header.pop("__metadata__", None)
    for key, entry in header.items():
        kind = entry.get("dtype") if isinstance(entry, dict) else None
        if isinstance(kind, str) and kind not in DTYPES:
            packed = " (several numbers in a byte)" if kind in PACKED else ""
            raise UnknownKind(f"{key} holds numbers of the kind {kind}{packed}; known are {', '.join(DTYPES)}")
        if not _is_entry(entry):
            raise Damaged(f"{key}: its entry in the header is {str(entry)[:80]}")
    return header, 8 + length, size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise Damaged("its header names a key twice")
    return dict(pairs)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return False
    numbers = (entry["shape"], entry["data_offsets"])
    whole = all(isinstance(values, list) and all(type(n) is int and n >= 0 for n in values) for values in numbers)
    return whole and len(entry["data_offsets"]) == 2 and entry["dtype"] in DTYPES


def _reader(path: pathlib.Path, shape: tuple[int, ...], dtype: np.dtype, offset: int):
    def read() -> np.ndarray:
        array = read_file(path, dtype, math.prod(shape), offset)
        if array.size != math.prod(shape):
            raise Damaged(f"{path}: ends inside a tensor; was it changed while being read?")
        return array.reshape(shape)

    return read


def write_file(state: Mapping[str, Any], path: pathlib.Path) -> None:
    """Write arrays or LazyArrays in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offset = 0
    for key, value in state.items():
        dtype = np.dtype(value.dtype)
        size = math.prod(value.shape) * dtype.itemsize
        header[key] = {"dtype": NAMES[dtype], "shape": list(value.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in state.values():
            file.write(as_bytes(value))
