"""Write the original's checkpoint folders during a run: checkpoint-STEP, best_model, final_model."""

import io
import json
import pathlib
import random
import re
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original.legacy_config import original_order

GROUPS = ("memory", "memory_bank", "lora", "base_model")  # parameter groups in the order of optimizer.bin


def write(config, tree: Mapping[str, Any], run: pathlib.Path, meta: Mapping[str, Any]) -> None:
    """Write checkpoint-STEP if it is due or the best so far (then best_model too), and final_model at the end.

    tree: the training state. meta: see TorchTwin.checkpoint and write_folder. The loss in trainer_state.json is the
    best evaluation's if the folder was written for it, else that of meta["metrics"]. Like the original's
    save_total_limit, all but the newest checkpoint.keep_last folders checkpoint-* are deleted.
    """
    if meta["final"]:
        write_folder(run / "final_model", config, tree, meta)
        return
    if not (meta["due"] or meta["best"]):
        return
    folder = run / f"checkpoint-{meta['step']}"
    write_folder(folder, config, tree, meta)
    if meta["best"]:
        shutil.rmtree(run / "best_model", ignore_errors=True)
        shutil.copytree(folder, run / "best_model")
        loss = meta["best_metrics"].get("loss")
        for evaluated in (run / "best_model", *([] if meta["due"] else [folder])):
            write_progress(evaluated, {**meta, "metrics": {"loss": loss}})
    if meta["due"]:
        delete_old(run, config.checkpoint.keep_last)


def delete_old(run: pathlib.Path, limit: int) -> None:
    """Delete all but the newest `limit` folders checkpoint-STEP."""
    for folder in by_step(run)[:-limit]:
        shutil.rmtree(folder)


def by_step(run: pathlib.Path) -> list[pathlib.Path]:
    """Return the checkpoint-* folders, sorted by step."""
    folders = [
        path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()
    ]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def write_folder(folder: pathlib.Path, config, tree: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint folder: model.pt, model.safetensors, optimizer.bin, scheduler.bin, random_states_0.pkl,
    config.yaml, trainer_state.json.

    model.pt has every key, in checkpoint.save_precision; model.safetensors omits a tied lm_head, as accelerate does.
    meta["sections"]: the original's config; by default its sections model and memory.
    """
    from omegaconf import OmegaConf

    from torch_bridge import files

    sections = meta["sections"] if "sections" in meta else original_sections(config)
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(tree["model"])
    files.save(files.cast(state, config.checkpoint.save_precision), folder / "model.pt")
    tied = [key for key in state if key.endswith("lm_head.weight") and _is_tied(key, state)]
    files.save({key: value for key, value in state.items() if key not in tied}, folder / "model.safetensors")
    optimizer, order = in_original_order(tree["optimizer"])
    files.save(optimizer, folder / "optimizer.bin")
    files.save(_reordered(tree["scheduler"], order), folder / "scheduler.bin")
    (folder / "random_states_0.pkl").write_bytes(random_states())
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(sections)))
    write_progress(folder, meta)


def write_progress(folder: pathlib.Path, meta: Mapping[str, Any]) -> None:
    """Write trainer_state.json."""
    progress = {
        "best_loss": meta["best_metrics"].get("loss"),
        "epoch": meta["epoch"],
        "global_step": meta["step"],
        "loss": meta["metrics"].get("loss"),
        "patience_counter": meta["bad"],
    }
    (folder / "trainer_state.json").write_text(json.dumps(progress, indent=2, sort_keys=True))


def random_states() -> bytes:
    """Return the random states of Python, numpy and torch, in the format that accelerate's load_state reads.

    A run here does not use them (it draws from its seed and step); they are for scripts that resume with accelerate.
    """
    import torch

    states = {
        "step": 0,  # no pending micro-batches: a checkpoint follows an update
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def _is_tied(key: str, state: Mapping[str, Any]) -> bool:
    return any(other is state[key] for name, other in state.items() if name != key)


def in_original_order(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the optimizer state with its groups in the original's order and parameters renumbered, and the groups'
    former indices. Groups without names (a user's own optimizer) are left as they are, with []."""
    groups = optimizer["param_groups"]
    if not all("name" in group for group in groups):
        return dict(optimizer), []
    rank = {name: i for i, name in enumerate(GROUPS)}
    order = sorted(range(len(groups)), key=lambda i: rank[str(groups[i]["name"]).removesuffix(" without decay")])
    numbers = [number for i in order for number in groups[i]["params"]]
    new = {number: i for i, number in enumerate(numbers)}
    state = {new[number]: entry for number, entry in optimizer["state"].items()}
    groups = [{**groups[i], "params": [new[number] for number in groups[i]["params"]]} for i in order]
    return {"state": dict(sorted(state.items())), "param_groups": groups}, order


def _reordered(scheduler: Mapping[str, Any], order: list[int]) -> dict[str, Any]:
    by_group = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
    move = lambda value: [value[i] for i in order] if len(value) == len(order) else value
    return {key: move(value) if key in by_group else value for key, value in scheduler.items()}


def original_sections(config) -> dict[str, dict[str, Any]]:
    """Return the sections model and memory with the original's keys.

    Raises UserError for settings that the original does not have.
    """
    sections = {"model": config.model.model_dump(mode="json"), "memory": config.memory.model_dump(mode="json")}
    foreign = [f"memory.{key}" for key in ("mask_aware_pooling", "chapter_softmax") if _changed(config.memory, key)]
    foreign += [f"memory.{key}=prefix" for key, value in sections["memory"].items() if value == "prefix"]
    foreign += ["model.base_config"] if config.model.base_config is not None else []
    if foreign:
        raise UserError(f"--format original: the original has no {', '.join(foreign)}; take --output F.safetensors")
    return {name: {key: values[key] for key in original_order(name, values)} for name, values in sections.items()}


def _changed(section, key: str) -> bool:
    return getattr(section, key) != type(section).model_fields[key].default
