"""Identify the run that a folder holds, so that no other run resumes in it.

    fingerprint.json    the run's identity, and digests of everything that makes it this run

Settings, model, loss, a given optimizer and data decide if two runs are the same. Weights and code decide only if the
saved run is complete: a script that draws its initial weights without a seed, or whose code was fixed, may be started
again and resumes, with a warning. Settings in FREE may change at any time.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxtrain import config_io, strict_json
from jaxtrain.errors import UserError
from jaxtrain.task import Task
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint import retention
from jaxtrain.train.program import Program
from jaxtrain.train.resume import object_digest
from jaxtrain.train.resume.object_digest import Leaves

FILE = "fingerprint.json"
DECIDING = ("settings", "model", "loss", "optimizer", "data")
FREE = (  # settings that may change when a run resumes: its length, its logging, how it is computed and monitored
    "task", "deterministic", "init_from", "run.*", "tracking.*", "checkpoint.*", "shard.*", "train.epochs",
    "train.steps", "train.log_every_steps", "train.steps_per_call", "train.remat", "train.hang_timeout_s",
    "train.nan_policy", "train.max_skipped_steps", "evaluation.every_epochs", "evaluation.every_steps",
    "evaluation.patience", "evaluation.min_delta", "evaluation.test", "data.eval_batch_size", "data.num_workers",
    "data.start_method", "data.prefetch_batches", "data.placement", "data.device_limit_bytes", "data.timeout_s",
    "profile.*", "data.micro_batch", "data.memory_limit_bytes",
)  # fmt: skip
SAMPLED_STEPS = 32  # steps of a schedule to digest


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Identity of a run. parts: digests by name, for each of settings, model, loss, optimizer, data, weights and code.

    identity: one hash for the run, the same in all its checkpoints.
    """

    identity: str
    parts: Mapping[str, Leaves]

    @classmethod
    def of(cls, parts: Mapping[str, Leaves]) -> "Fingerprint":
        text = json.dumps({name: parts[name] for name in sorted(parts)}, sort_keys=True)
        return cls(hashlib.sha256(text.encode()).hexdigest()[:32], dict(parts))

    def differences(self, saved: "Fingerprint", names: tuple[str, ...]) -> list[str]:
        """Return names such as "settings.optim.lr" for everything that both have and that differs."""
        found = []
        for name in names:
            ours, theirs = self.parts.get(name, {}), saved.parts.get(name, {})
            found += [f"{name}.{key}" for key in ours if key in theirs and not set(ours[key]) & set(theirs[key])]
        return found

    def record(self, folder: pathlib.Path, goes_on: bool) -> "Fingerprint":
        """Write fingerprint.json; return this fingerprint, with the identity of the folder's run if it resumes that."""
        saved = read_or_own(folder, self)[0] if goes_on else None
        identity = lost_identity(folder) if goes_on else None
        mine = self if saved is None else dataclasses.replace(self, identity=saved.identity)
        mine = mine if identity is None else dataclasses.replace(mine, identity=identity)
        if saved is None or saved is self or not (folder / FILE).is_file() or mine.differences(saved, DECIDING):
            run_dir.write(folder, FILE, json.dumps({"identity": mine.identity, "parts": mine.parts}, indent=1))
        return mine


def read(folder: pathlib.Path) -> Fingerprint | None:
    """Return the fingerprint of a folder; for one written by an older version, only its settings. None if there is
    none. Raises UserError if it cannot be read."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / FILE}: cannot be read ({error}); move it away to go on without it") from None
    if text is not None:
        return parse(text, folder / FILE)
    if not (folder / "config.yaml").is_file():
        return None
    return Fingerprint.of({"settings": _settings(config_io.read(folder / "config.yaml"))})


def read_or_own(folder: pathlib.Path, now: Fingerprint) -> tuple[Fingerprint | None, list[str]]:
    """Return the fingerprint of a folder and warnings. If it is damaged, but the newest checkpoint is of the run `now`,
    return `now` instead."""
    try:
        return read(folder), []
    except UserError as error:
        if retention.run_of_newest(folder / "checkpoints") != now.identity:
            raise
        return now, [f"{str(error).partition(';')[0]}; its checkpoints are of this very run, which writes it anew"]


def lost_identity(folder: pathlib.Path) -> str | None:
    """Return the identity that a folder's newest checkpoint records, if fingerprint.json is missing; None if it is
    there, if there is no checkpoint, or if an older version wrote it."""
    return None if (folder / FILE).is_file() else retention.run_of_newest(folder / "checkpoints")


def parse(text: str, where: str | pathlib.Path) -> Fingerprint:
    """Parse the text of a fingerprint.json. where: its path, for messages. Raises UserError if it is damaged."""
    try:
        content = strict_json.loads(text)
        return Fingerprint(content["identity"], content["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: cannot be read ({error}); move it away to go on without it") from None


def of(program: Program, model: Any, loss: Any, data: "UserData") -> Fingerprint:
    """Return the fingerprint of the run that a fresh program is about to begin. model, loss: the user's, or None."""
    return Fingerprint.of(
        {
            "settings": _settings(program.config.model_dump(mode="json")),
            "model": _model(program, model),
            "loss": _loss(loss, program.task),
            "optimizer": _optimizer(program),
            "data": _data(program, data),
            "weights": _weights(program, model),
            "code": _code(program.task, model, loss, data),
        }
    )


def _settings(values: Mapping[str, Any]) -> Leaves:
    found: Leaves = {}
    for key, value in config_io.flatten(values).items():
        if key == "init_from":
            found["init_from"] = [str(value is not None)]
            if value is not None and os.path.exists(os.path.expanduser(value)):
                found["what init_from holds"] = object_digest.digests_of_path(os.path.expanduser(value))
        elif any(fnmatch.fnmatchcase(key, free) for free in FREE):
            continue
        elif key.startswith("data.") and isinstance(value, str) and os.path.exists(os.path.expanduser(value)):
            found[key] = object_digest.digests_of_path(os.path.expanduser(value))
        else:
            found[key] = [_short(json.dumps(value, sort_keys=True))]  # hashed, because the file may be shared
    return found


def _model(program: Program, model: Any) -> Leaves:
    """Digest kind, dtype and shape of every array, and what the modules of a user's model otherwise hold and read."""
    found: Leaves = {}
    for kind in ("params", "frozen", "buffers"):
        arrays = getattr(program.start.shapes, kind)
        found |= {key: [f"{kind} {array.dtype} {list(array.shape)}"] for key, array in arrays.items()}
    found["all arrays"] = [_short(" ".join(sorted(found)))]
    read = object_digest.captured(model, "read") if model is not None else {}
    return found | _structure(model, "") | read


def _structure(module: Any, place: str) -> Leaves:
    """Digest the types and settings of a torch or flax module's submodules, without arrays."""
    if module is None:
        return {}
    if hasattr(module, "named_modules"):
        parts = {name: (part, part.extra_repr()) for name, part in module.named_modules()}
    else:
        graph = nnx.iter_graph(module)
        parts = {".".join(map(str, path)): (part, "") for path, part in graph if isinstance(part, nnx.Module)}
    found: Leaves = {f"{place}parts": [_short(" ".join(sorted(parts)))]}
    for name, (part, told) in parts.items():
        held = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "training"}
        kept = {
            key: value for key, value in held.items() if value is None or isinstance(value, (bool, int, float, str))
        }
        functions = {key: value for key, value in held.items() if hasattr(value, "__qualname__")}
        leaves = object_digest.describe([type(part), told, sorted(kept.items()), sorted(functions)], "part")
        leaves |= object_digest.describe(functions, "functions")
        text = json.dumps(leaves, sort_keys=True)
        # The type is in the hash, not in the key, so that another type counts as a difference.
        found[f"{place}{name or 'model'}"] = [_short(text)]
    return found


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _loss(loss: Any, task: Any) -> Leaves:
    """Digest what loss and task functions read from closures and globals, and a loss module's type and settings."""
    found: Leaves = {}
    for field in dataclasses.fields(task):
        found |= object_digest.captured(getattr(task, field.name), f"task.{field.name}")
    if hasattr(loss, "named_modules"):
        return found | _structure(loss, "loss ") | {"loss": [type(loss).__qualname__]}
    return found | object_digest.describe(loss, "loss")


def _optimizer(program: Program) -> Leaves:
    """Digest the options and the current state of the user's optimizer, and the rates of the user's schedule."""
    given, found = program.given, {"given": [str(program.given is not None)]}
    if program.given_schedule is not None:
        rates = [repr(program.given_schedule(step)) for step in range(SAMPLED_STEPS)]
        found["schedule"] = [_short(" ".join(rates))]
    if given is None:
        return found
    found |= object_digest.describe(given.options(), "options")
    arrays = jax.tree_util.tree_flatten_with_path(program.state.opt_state)[0]
    told = [f"{jax.tree_util.keystr(path)} {object_digest.sample_of_array(array)}" for path, array in arrays]
    return found | {"state": [_short(" ".join(told))]}


def _data(program: Program, data: "UserData") -> Leaves:
    """Digest the given datasets' content and number of samples."""
    found = dict(data.leaves)
    for split, dataset in data.datasets.items():
        source = program.data.source(split) if dataset is not None or split == "train" else None
        size = len(source) if source is not None and hasattr(source, "__len__") else getattr(source, "size", None)
        found |= {f"{split} given": [str(dataset is not None)]} | (
            {} if size is None else {f"{split} size": [str(size)]}
        )
    return found


def _weights(program: Program, model: Any) -> Leaves:
    """Digest the weights of a user's model; those of a task's model follow from the seed."""
    if model is None:
        return {}
    arrays = {**program.state.params, **program.state.frozen}
    return {key: [object_digest.sample_of_array(array)] for key, array in arrays.items()}


def _code(task: Task, model: Any, loss: Any, data: "UserData") -> Leaves:
    parts = {"model": model, "loss": loss, **data.datasets}
    parts |= {f"task.{field.name}": getattr(task, field.name) for field in dataclasses.fields(task)}
    used = {
        name: part for name, part in parts.items() if callable(part) or (name in data.datasets and part is not None)
    }
    found = {name: object_digest.code_of(part) for name, part in used.items()}
    return {name: [code] for name, code in found.items() if code}


class UserData:
    """Digests of the user's datasets, made before anything is read from them.

    Reading changes some datasets (a cache, a counter). In this process, what training changed in a dataset does not
    make it a different one afterwards; what the user changed does.
    """

    _known: ClassVar[dict[int, tuple[Any, Leaves, set[str]]]] = {}  # dataset, first digests, keys that changed

    def __init__(self, datasets: Mapping[str, Any]):
        self.datasets = dict(datasets)
        self.leaves: Leaves = {}
        for split, dataset in self.datasets.items():
            if dataset is not None:
                now = object_digest.describe(dataset)
                _, first, changed = self._known.get(id(dataset), (None, now, set()))
                now |= {key: first[key] for key in changed}
                self._remember(dataset, now, changed)
                self.leaves |= {f"{split}{key}": told for key, told in now.items()}

    def _remember(self, dataset: Any, now: Leaves, changed: set[str]) -> None:
        number = id(dataset)
        with contextlib.suppress(TypeError):  # a dict or a list has no weakref, and training does not change it
            self._known[number] = (weakref.ref(dataset, lambda _: self._known.pop(number, None)), now, changed)

    def after_training(self) -> None:
        for dataset in self.datasets.values():
            if id(dataset) in self._known:
                _, first, changed = self._known[id(dataset)]
                last = object_digest.describe(dataset)
                changed |= {key for key in first if last.get(key) != first[key]}
