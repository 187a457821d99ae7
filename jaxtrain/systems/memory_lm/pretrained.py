"""Weights of a Hugging Face folder, read leaf by leaf: a file is mapped, never loaded whole."""

import json
import pathlib
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def folder_of(name: str) -> pathlib.Path:
    """A local folder as it is; a hub id downloaded once (configuration, tokenizer, safetensors)."""
    path = pathlib.Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.base_model_name: {name} is no local folder, and not on the hub: {reason}") from None


class MappedTensors(Mapping[str, np.ndarray]):
    """The tensors of one or several safetensors files as views of the mapped files. Slicing reads only what it takes.

    Source: the safetensors format (an 8-byte length, a JSON header, the data).
    """

    def __init__(self, paths: list[pathlib.Path]):
        self._entries: dict[str, tuple[np.memmap, dict, int]] = {}
        for path in paths:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise UserError(f"{path}: not a readable safetensors file. Is it complete?")
                header = json.loads(file.read(size))
            data = np.memmap(path, np.uint8, "r")
            for name, entry in header.items():
                if name != "__metadata__":
                    self._entries[name] = (data, entry, 8 + size)

    def __getitem__(self, name: str) -> np.ndarray:
        data, entry, start = self._entries[name]
        first, last = entry["data_offsets"]
        return data[start + first : start + last].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def open_weights(folder: pathlib.Path) -> MappedTensors:
    """The tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json lists."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    absent = [str(path) for path in paths if not path.is_file()]
    if absent:
        raise UserError(f"{folder}: {', '.join(absent[:3])} missing; wanted Hugging Face weights as safetensors")
    return MappedTensors(paths)


def initial_weights(config) -> dict[str, np.ndarray] | None:
    """The base model's weights under the adapter's keys; None where it starts from random ones.

    Raises UserError where the folder lacks a weight of the model.
    """
    if config.model.base_model_name is None:
        return None
    from jaxtrain.systems.memory_lm.adapter import backbone_config

    weights = open_weights(folder_of(config.model.base_model_name))
    state = {f"base_model.{name}": weights[name] for name in weights if not name.endswith("rotary_emb.inv_freq")}
    if backbone_config(config.model).tied:
        state.setdefault("base_model.lm_head.weight", state.get("base_model.model.embed_tokens.weight"))
    missing = [key for key in base_keys(config) if state.get(key) is None]
    if missing:
        raise UserError(f"{config.model.base_model_name}: {len(missing)} weights missing, as {', '.join(missing[:3])}")
    return state


def base_keys(config) -> list[str]:
    """Keys of the base model's own weights."""
    from flax import nnx

    from jaxtrain.systems.memory_lm.adapter import build_model
    from torch_bridge.layouts import named_variables

    model = nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0)))
    keys = [key for key, _ in named_variables(model) if key.startswith("base_model.")]
    return [key for key in keys if not key.endswith((".lora_A", ".lora_B"))]
