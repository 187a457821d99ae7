"""Write LoRA adapter folders that PEFT can load."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch_bridge import files
from torch_bridge.atomic_file import write_text


def save_folder(
    folder: str | pathlib.Path,
    weights: Mapping[str, Any],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str],
    modules_to_save: Sequence[str] = (),
    fan_in_fan_out: bool = False,
    base: str | None = None,
    task_type: str | None = None,
) -> pathlib.Path:
    """Write adapter_model.safetensors and adapter_config.json.

    weights: by the module's own names, "encoder.query.lora_A.weight". targets: names of the layers with an adapter.
    base: name or path of the base model. fan_in_fan_out: the layers' weights are [in, out].
    """
    folder = pathlib.Path(folder)
    named = {f"base_model.model.{key}": value for key, value in weights.items()}
    files.save(named, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": list(modules_to_save) or None,
    }
    write_text(folder / "adapter_config.json", json.dumps(described, indent=1) + "\n")
    return folder
