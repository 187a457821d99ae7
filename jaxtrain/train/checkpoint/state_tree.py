"""Convert a TrainState to the plain tree that orbax writes, and back."""

import dataclasses
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.errors import UserError
from jaxtrain.train.checkpoint import misfit
from jaxtrain.train.step.state import TrainState


def restore(path: pathlib.Path, like: TrainState, optimizer: bool = True) -> TrainState:
    """Return the state in an orbax folder, with shapes, dtypes and shardings as in `like` (any mesh).

    optimizer: False leaves the optimizer's state out, whatever optimizer it is of.
    Raises UserError, listing the differences, if it is of another model or optimizer.
    """
    like = like if optimizer else like.replace(opt_state=())
    wanted = as_tree(like)
    restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype), wanted)
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    with Reachable(path) as place, jax.enable_x64(True):  # without it orbax cuts int64 counters to 32 bits
        _check(place, path, wanted, optimizer)
        tree = handler.restore(place, args=ocp.args.PyTreeRestore(wanted, restore_args, partial_restore=not optimizer))
    return _from_tree(tree, like)


def restore_parts(path: pathlib.Path, parts: dict[str, Any], sharding: Any) -> dict[str, Any]:
    """Return only these parts of the state in an orbax folder, every array on `sharding`."""
    parts, empty = _filled(parts)
    restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding), parts)
    me = jax.process_index()  # lets one process read alone: orbax would wait for all of them
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"alone{me}")
    reader = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, multiprocessing_options=alone)
    handler = ocp.Checkpointer(reader, multiprocessing_options=alone)
    with Reachable(path) as place, jax.enable_x64(True):
        restored = handler.restore(place, args=ocp.args.PyTreeRestore(parts, restore_args, partial_restore=True))
    return _with_empty(restored, empty, lambda leaf: sharding)


def restore_weights(path: pathlib.Path, sharding: Any) -> dict[str, Any]:
    """Return params, frozen, buffers and ema in an orbax folder, by name, on `sharding`; no model is needed."""
    with Reachable(path) as place:
        saved = _saved(place)
    shape = lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
    kinds = ("params", "frozen", "buffers", "ema")
    return restore_parts(path, {kind: jax.tree.map(shape, saved[kind]) for kind in kinds if kind in saved}, sharding)


def check_restores(path: pathlib.Path, state: TrainState) -> None:
    """Raise ValueError if the written state cannot be read back; checks its names and shapes, and reads one number."""
    with Reachable(path) as place:
        try:
            _check(place, path, as_tree(state))
        except UserError as error:
            raise ValueError(str(error)) from None
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if not restore_parts(path, {"step": jax.ShapeDtypeStruct((), state.step.dtype)}, device):
        raise ValueError(f"{path}: no number of it can be read")


PATTERNS = set("[*?\\")


class Reachable:
    """A folder's path that is safe for orbax, which treats paths as glob patterns: if the path has a `[`, `*`, `?` or
    `\\`, it is a symbolic link to the folder. The link exists until `close`, or the end of a `with`."""

    def __init__(self, folder: pathlib.Path):
        self.path = epath.Path(folder)
        self._home: tempfile.TemporaryDirectory | None = None
        if PATTERNS & set(str(folder)):
            self._home = tempfile.TemporaryDirectory(prefix="jaxtrain-link-", dir=_plain_folder())
            link = pathlib.Path(self._home.name) / "folder"
            link.symlink_to(folder.absolute(), target_is_directory=True)
            self.path = epath.Path(link)

    def close(self) -> None:
        if self._home is not None:
            self._home.cleanup()  # removes the link, not its target

    def __enter__(self) -> epath.Path:
        return self.path

    def __exit__(self, *_: Any) -> None:
        self.close()


def _plain_folder() -> str:
    """Return a writable folder for temporary files whose path is no glob pattern. Raises UserError if there is none."""
    for folder in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if not PATTERNS & set(folder) and os.access(folder, os.W_OK):
            return folder
    raise UserError("TMPDIR: wanted a folder that can be written and has no `[`, `*`, `?` or `\\` in its name")


def _saved(path: epath.Path) -> dict[str, Any]:
    """Return shapes and dtypes of the arrays in an orbax folder."""
    metadata = ocp.PyTreeCheckpointer().metadata(path).item_metadata
    if metadata is None:
        raise UserError(f"{path}: no arrays can be read from the checkpoint")
    return metadata.tree


def _check(place: epath.Path, path: pathlib.Path, wanted: dict[str, Any], optimizer: bool = True) -> None:
    """Raise UserError if the arrays in `place` have other names or shapes than wanted. path: its real path."""
    shapes = lambda tree: {_name(p): tuple(leaf.shape) for p, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    found = misfit.sentence(shapes(_saved(place)), shapes(wanted), path, optimizer)
    if found:
        raise UserError(found)


def as_tree(state: TrainState) -> dict[str, Any]:
    """Return the state as nested dicts, with the random key as its data. Empty parts and arrays without elements, which
    orbax does not accept, are left out, and created again on restore."""
    return _filled(_tree_of(state))[0]


def _tree_of(state: TrainState) -> dict[str, Any]:
    tree = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    tree["rng"] = _key_data(state.rng)
    tree["opt_state"] = dict(enumerate_leaves(state.opt_state))
    return tree


def _filled(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split a tree into one without empty arrays, and the empty arrays."""
    is_empty = lambda leaf: hasattr(leaf, "shape") and 0 in leaf.shape
    flat = {name: part for name, part in tree.items() if isinstance(part, dict)}
    empty = {name: {key: leaf for key, leaf in part.items() if is_empty(leaf)} for name, part in flat.items()}
    filled = {name: {k: leaf for k, leaf in part.items() if not is_empty(leaf)} for name, part in flat.items()}
    rest = {name: filled.get(name, part) for name, part in tree.items()}
    return {name: part for name, part in rest.items() if not isinstance(part, dict) or part}, empty


def _with_empty(tree: dict[str, Any], empty: dict[str, dict[str, Any]], sharding_of: Any) -> dict[str, Any]:
    """Return the tree with its empty arrays created again."""
    for name, part in empty.items():
        made = {key: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), sharding_of(leaf)) for key, leaf in part.items()}
        if made:
            tree[name] = {**tree.get(name, {}), **made}
    return tree


def enumerate_leaves(tree: Any):
    """Yield ("mu.layers.0.weight", leaf) for every leaf of an optimizer state."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield _name(path), leaf


def _from_tree(tree: dict[str, Any], like: TrainState) -> TrainState:
    tree = _with_empty(tree, _filled(_tree_of(like))[1], lambda leaf: leaf.sharding)
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
