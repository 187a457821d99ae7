"""A TrainState as the plain tree that orbax writes, and back."""

import dataclasses
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.errors import UserError
from jaxtrain.train.state import TrainState


def restore(path: pathlib.Path, like: TrainState) -> TrainState:
    """The state in an orbax folder, each array laid out as in `like` (shapes, dtypes and shardings; any mesh).

    Raises UserError listing what differs where it is of another model or optimizer.
    """
    wanted = as_tree(like)
    _check(epath.Path(path), wanted)
    restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype), wanted)
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    tree = handler.restore(epath.Path(path), args=ocp.args.PyTreeRestore(wanted, restore_args))
    return _from_tree(tree, like)


def restore_parts(path: pathlib.Path, parts: dict[str, Any], sharding: Any) -> dict[str, Any]:
    """Only these parts of it, every array on `sharding`."""
    parts = {name: part for name, part in parts.items() if not isinstance(part, dict) or part}
    restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding), parts)
    me = jax.process_index()  # one process may read alone; orbax would wait for all of them
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"alone{me}")
    reader = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, multiprocessing_options=alone)
    handler = ocp.Checkpointer(reader, multiprocessing_options=alone)
    return handler.restore(epath.Path(path), args=ocp.args.PyTreeRestore(parts, restore_args, partial_restore=True))


def _check(path: epath.Path, wanted: dict[str, Any]) -> None:
    saved = ocp.PyTreeCheckpointer().metadata(path).item_metadata.tree
    have = {_name(p): tuple(leaf.shape) for p, leaf in jax.tree_util.tree_flatten_with_path(saved)[0]}
    want = {_name(p): tuple(leaf.shape) for p, leaf in jax.tree_util.tree_flatten_with_path(wanted)[0]}
    keys = sorted(want, key=lambda key: not key.startswith("params."))  # weights tell more than moments
    lines = [
        f"{key} is {list(have[key])}, the config wants {list(want[key])}"
        for key in keys
        if key in have and have[key] != want[key]
    ]
    lines += [f"{key} is missing from the checkpoint" for key in keys if key not in have]
    lines += [f"{key} is unknown to the config" for key in have if key not in want]
    if lines:
        more = f"\n  ... and {len(lines) - 6} more" if len(lines) > 6 else ""
        raise UserError(
            f"{path}: the checkpoint does not fit this config, {len(lines)} differences:\n  "
            + "\n  ".join(lines[:6])
            + more
            + "\nUse the config it was trained with (config.yaml beside it), or another run.dir to start afresh"
        )


def as_tree(state: TrainState) -> dict[str, Any]:
    """Plain nested dicts; the random key as its numbers, empty parts left out."""
    tree = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    tree["rng"] = _key_data(state.rng)
    tree["opt_state"] = dict(enumerate_leaves(state.opt_state))
    return {name: value for name, value in tree.items() if not isinstance(value, dict) or value}


def enumerate_leaves(tree: Any):
    """("mu.layers.0.weight", leaf) for every leaf of an optimizer state."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield _name(path), leaf


def _from_tree(tree: dict[str, Any], like: TrainState) -> TrainState:
    names = [name for name, _ in enumerate_leaves(like.opt_state)]
    opt_state = tree.get("opt_state", {})
    opt_state = jax.tree.unflatten(jax.tree.structure(like.opt_state), [opt_state[name] for name in names])
    fields = {field.name: tree.get(field.name, {}) for field in dataclasses.fields(like)}
    return TrainState(**{**fields, "rng": jax.random.wrap_key_data(tree["rng"]), "opt_state": opt_state})


def _key_data(key):
    if isinstance(key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, key)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)
    return jax.random.key_data(key)


def _name(path: tuple) -> str:
    return ".".join(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)
