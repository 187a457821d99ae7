"""Names and kinds of a model's arrays, recorded in the run folder, so that torch files can be written from a checkpoint
of a model that was passed to Trainer in Python and that no command can build again.

    model.json    every key of the state dict in torch's order, with the array behind it
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import strict_json
from jaxtrain.errors import UserError
from jaxtrain.task import Loss, Task, trains
from torch_bridge.layouts import Buffer, Carry, Frozen, children, key_of, named_variables
from torch_bridge.state_dict import versions, with_versions

FILE = "model.json"
KINDS = {"parameter": nnx.Param, "frozen": Frozen, "buffer": Buffer, "carry": Carry}


@dataclasses.dataclass(frozen=True, eq=False)
class Outline:
    """Content of model.json.

    entries: by key of the state dict: name and kind of its array, shape, dtype; of a parameter also whether it trains
        and its group. A tied array is under each of its keys. Carried arrays follow the others.
    lists: length of every nnx.List, by its path. versions: torch's format versions by module. extra: keys of extra
        states, which only the module itself has. doubles: keys of float64 and complex128 tensors -> that dtype.
        rounded: those whose first values single precision does not hold.
    """

    entries: Mapping[str, Mapping[str, Any]]
    lists: Mapping[str, int]
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: tuple[str, ...] = ()
    doubles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rounded: tuple[str, ...] = ()


def _outline_of(program: Any) -> Outline:
    """Return the outline of a program's model."""
    task, config = program.task, program.config
    abstract = jax.eval_shape(lambda: (program.state.params, program.state.frozen, program.state.buffers))
    model = program.model_def.merge(*abstract)
    entries = {key: _entry(task, config, key, variable) for key, variable in named_variables(model)}
    listed = {entry["array"] for entry in entries.values()}
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, Carry) and key_of(path) not in listed and _is_plain(variable):
            entries[key_of(path)] = _entry(task, config, key_of(path), variable)
    doubles = getattr(model, "doubles", {})
    with np.errstate(over="ignore"):
        rounded = [key for key, value in doubles.items() if not _fits(value)]
    module = None if task.twin is None else task.twin.module
    formats: dict[str, Any] = {}
    extra: list[str] = []
    if module is not None:
        from torch_bridge.training.own_loading import complete

        completed = complete(module, {})
        formats, extra = dict(versions(completed)), list(completed)
    return Outline(
        entries,
        dict(_lists(model, ())),
        formats,
        tuple(extra),
        {key: str(value.dtype) for key, value in doubles.items()},
        tuple(rounded),
    )


def text_of(program: Any) -> str:
    """Return the content of model.json for a program's model."""
    return json.dumps(dataclasses.asdict(_outline_of(program)))


def task_of(folder: pathlib.Path) -> Task | None:
    """Return a Task whose model holds the arrays that a run folder records, and computes nothing; None without a
    record. Raises UserError if the record is damaged."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        outline = Outline(**strict_json.loads(text))
        _Recorded(outline)  # fails here, not in the middle of an export
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: is damaged ({error}); the script that trained can write it again") from None
    by_array = {entry["array"]: entry for entry in outline.entries.values()}
    return Task(
        build_model=lambda config, rngs: _Recorded(outline),
        loss=lambda model, batch, config, rngs: _no_forward(folder),
        trainable=lambda key, config: by_array[key]["trains"],
        param_group=lambda key, config: by_array[key]["group"],
    )


def completed(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of a recorded model with torch's format versions; of another model as it is.

    Raises UserError as `check_exports`.
    """
    check_exports(model)
    outline = getattr(model, "recorded_outline", None)
    return dict(state) if outline is None else with_versions(state, outline.versions)


def check_exports(model: Any) -> None:
    """Raise UserError if a recorded model holds what only the module in Python has whole."""
    outline = getattr(model, "recorded_outline", None)
    if outline is None:
        return
    if lost := outline.rounded or outline.extra:
        what = "float64 numbers that a checkpoint holds in single precision" if outline.rounded else "extra states"
        raise UserError(
            f"{', '.join(lost[:3])}: {what}; only the script that made the module has them: trainer.load_best(), then "
            "torch.save(model.state_dict(), F). exports/best.pt of a finished run has them too"
        )


class _Level(nnx.Module):
    """A submodule of a recorded model."""


class _Recorded(nnx.Module):
    """Zeros in place of a recorded model's arrays, under their names."""

    def __init__(self, outline: Outline):
        self.recorded_outline = outline
        made: dict[str, nnx.Variable] = {}
        for key, entry in outline.entries.items():
            if entry["array"] not in made:
                made[entry["array"]] = KINDS[entry["kind"]](_zeros(entry))
            *levels, name = _parts(key)
            level: Any = self
            for i, part in enumerate(levels):
                level = _child(level, part, outline.lists.get(".".join(levels[: i + 1])))
            if isinstance(level, nnx.List):
                level[int(name)] = made[entry["array"]]
            else:
                setattr(level, name, made[entry["array"]])

    @property
    def doubles(self) -> dict[str, np.ndarray]:
        """Return values of the right dtype that equal no checkpoint's: the checkpoint's are taken."""
        nan = {key: np.full((), np.nan, dtype) for key, dtype in self.recorded_outline.doubles.items()}
        return {key: np.broadcast_to(value, self.recorded_outline.entries[key]["shape"]) for key, value in nan.items()}


def _entry(task: Task, config: Any, key: str, variable: nnx.Variable) -> dict[str, Any]:
    array = variable.get_metadata("key")
    trained = isinstance(variable, nnx.Param) and trains(task, array, config)
    kinds = ((nnx.Param, "parameter"), (Frozen, "frozen"), (Carry, "carry"), (nnx.Variable, "buffer"))
    kind = next(name for cls, name in kinds if isinstance(variable, cls))
    found = {"array": array, "kind": kind, "shape": list(variable.shape), "dtype": str(variable.dtype)}
    group = task.param_group(array, config) if kind in ("parameter", "frozen") else "default"
    return found | {"trains": trained, "group": group}


def _is_plain(variable: nnx.Variable) -> bool:
    return not jnp.issubdtype(variable.dtype, jax.dtypes.prng_key)


def _fits(value: np.ndarray) -> bool:
    """Return True if single precision holds the values exactly."""
    single = np.complex64 if np.iscomplexobj(value) else np.float32
    return np.array_equal(value.astype(single).astype(value.dtype), value, equal_nan=True)


def _lists(module: nnx.Pytree, prefix: tuple):
    for name, value in children(module):
        if isinstance(value, nnx.List):
            yield key_of((*prefix, name)), len(value)
        if isinstance(value, nnx.Pytree):
            yield from _lists(value, (*prefix, name))


def _parts(key: str) -> list[str]:
    parts = key.split(".")
    if any(part.startswith(("__", "_pytree__")) or part == "recorded_outline" for part in parts):
        raise ValueError(f"{key!r} is no name of an array")
    return parts


def _child(level: Any, name: str, length: int | None) -> Any:
    """Return a level's submodule; add it if it is new. length: of a list."""
    if isinstance(level, nnx.List):
        if not isinstance(level[int(name)], nnx.Pytree) or (length is not None) != isinstance(
            level[int(name)], nnx.List
        ):
            level[int(name)] = _new(length)
        return level[int(name)]
    if name not in vars(level):
        setattr(level, name, _new(length))
    return vars(level)[name]


def _new(length: int | None) -> Any:
    return _Level() if length is None else nnx.List([_Level() for _ in range(length)])


def _zeros(entry: Mapping[str, Any]) -> jax.Array:
    dtype = jnp.dtype(entry["dtype"])
    with jax.enable_x64(True) if dtype.itemsize == 8 and dtype.kind in "iu" else contextlib.nullcontext():
        return jnp.zeros(tuple(entry["shape"]), dtype)


def _no_forward(folder: pathlib.Path) -> Loss:
    raise UserError(f"{folder}: its model was made in Python; no command can compute with it")
