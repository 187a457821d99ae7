"""Checkpoints of a run: written aside by orbax in the background, committed by a rename, pruned after the commit.

    checkpoints/<step>/state/       the TrainState, in orbax's format, sharded
    checkpoints/<step>/meta.json    what the host knows: metrics, best so far, plateau, unfinished averages

orbax's own manager would delete old checkpoints before a new one can be checked; here a checkpoint counts once its
meta.json stands, and only then may an older one go.
"""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.errors import UserError
from jaxtrain.train.state import TrainState


class Checkpoints:
    """The checkpoints folder of one run.

    keep_last, keep_best: how many of the newest and of the best by `metric` stay.
    """

    def __init__(self, folder: pathlib.Path, keep_last: int, keep_best: int, metric: str, mode: str):
        self.folder = folder.absolute()
        self.keep_last, self.keep_best, self.metric, self.mode = keep_last, keep_best, metric, mode
        self._saver = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
        self._pending: tuple[int, dict] | None = None
        self.newest: int | None = None  # the last one this process saved or restored; the same on every process

    def steps(self) -> list[int]:
        """Committed checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit() and (p / "meta.json").is_file())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def save(self, state: TrainState, step: int, meta: dict) -> None:
        """Start writing; returns when the arrays are copied off the device. Finishes the save before it, if any."""
        self.wait()
        if step == self.newest:
            return
        self.newest = step
        target = self.folder / str(step)
        self._saver.save(epath.Path(target) / "state", args=ocp.args.PyTreeSave(_as_tree(state)), force=True)
        self._pending = (step, meta)

    def wait(self) -> None:
        """Until the last save is committed: its arrays on disk, then its meta.json, then older ones pruned."""
        if self._pending is None:
            return
        self._saver.wait_until_finished()
        step, meta = self._pending
        self._pending = None
        if jax.process_index() == 0:
            path = self.folder / str(step) / "meta.json"
            aside = path.with_suffix(".part")
            aside.write_text(json.dumps(meta))
            aside.rename(path)
            self._prune()

    def poll(self) -> None:
        """Commit the last save if its arrays are written; does not wait."""
        if self._pending is not None and (self.folder / str(self._pending[0]) / "state").is_dir():
            self.wait()

    def meta(self, step: int) -> dict:
        return json.loads((self.folder / str(step) / "meta.json").read_text())

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step`, each array laid out as in `like` (shapes, dtypes and shardings; any mesh).

        Raises UserError listing what differs where the checkpoint is of another model or optimizer.
        """
        self.newest = step
        path = epath.Path(self.folder / str(step) / "state")
        wanted = _as_tree(like)
        self._check(path, wanted)
        restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype), wanted)
        handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
        tree = handler.restore(path, args=ocp.args.PyTreeRestore(wanted, restore_args))
        return _from_tree(tree, like)

    def restore_parts(self, step: int, parts: dict[str, Any], sharding) -> dict[str, Any]:
        """Only these parts of a checkpoint (weights without the optimizer), every array on `sharding`."""
        parts = {name: part for name, part in parts.items() if not isinstance(part, dict) or part}
        restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding), parts)
        me = jax.process_index()  # one process may read alone; orbax would wait for all of them
        alone = ocp.options.MultiprocessingOptions(me, {me}, f"alone{me}")
        reader = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, multiprocessing_options=alone)
        handler = ocp.Checkpointer(reader, multiprocessing_options=alone)
        path = epath.Path(self.folder / str(step) / "state")
        return handler.restore(path, args=ocp.args.PyTreeRestore(parts, restore_args, partial_restore=True))

    def _check(self, path, wanted) -> None:
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

    def _ranked(self) -> list[int]:
        sign = 1 if self.mode == "min" else -1
        scored = [(step, self.meta(step).get("metrics", {}).get(self.metric)) for step in self.steps()]
        scored = [(sign * value, step) for step, value in scored if value is not None and value == value]
        return [step for _, step in sorted(scored)]

    def _prune(self) -> None:
        steps = self.steps()
        keep = {*steps[-self.keep_last :], *self._ranked()[: self.keep_best]}
        for step in steps:
            if step not in keep:
                (self.folder / str(step) / "meta.json").unlink()  # it no longer counts, whatever is left of it
                shutil.rmtree(self.folder / str(step))
        for left in self.folder.iterdir():  # what an earlier process was killed over
            if left.name.isdigit() and int(left.name) not in steps:
                shutil.rmtree(left)


def _as_tree(state: TrainState) -> dict[str, Any]:
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
