"""Checkpoints of a run: written in the background under a temporary name, sealed with file hashes, then renamed.

    checkpoints/<step>/state/         the TrainState, in orbax's format, sharded
    checkpoints/<step>/history.jsonl  the epochs and evaluations of the run
    checkpoints/<step>/meta.json      the host's other records (metrics, best so far, plateau, unfinished averages),
                                      size and SHA-256 of every file, and a hash of all this
    checkpoints/<step>.part           unfinished: a save in progress, or one that was killed
    checkpoints/<step>.damaged        found damaged, and renamed

Older checkpoints are deleted only after a new one was read back and found intact.
"""

import contextlib
import copy
import errno
import itertools
import logging
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.data import stream_places
from jaxtrain.errors import UserError
from jaxtrain.runtime import host_memory, plain_files
from jaxtrain.train.checkpoint import history_file, manifest, orbax_logs, orbax_patches, retention, state_tree
from jaxtrain.train.checkpoint.mirror import Mirror
from jaxtrain.train.checkpoint.retention import DAMAGED, PART
from jaxtrain.train.checkpoint.save_agreement import Saving, agree, hear_others
from jaxtrain.train.checkpoint.save_failures import SaveFailures, is_lasting, reason_of
from jaxtrain.train.step.state import TrainState

ARRAYS = "state"
INDEX = "manifest.ocdbt"  # index of the arrays; without it none can be read
FORMAT_BYTES = 256 * 1024  # approximate size of orbax's own files
SPLIT_BYTES = 64 * 2**20  # replicas share the writing of an array from this size per slice on: slicing needs compiling


_saves = itertools.count()


class SaveError(UserError):
    """A required checkpoint cannot be written."""

    exit_code = 1


class Checkpoints:
    """The checkpoints folder of one run.

    keep_last, keep_best: how many of the newest and of the best by `metric` to keep. warn: called about failed saves
    and damaged checkpoints. mirror: if set, receives a copy of each checkpoint, and can restore them.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        keep_last: int,
        keep_best: int,
        metric: str,
        mode: str,
        warn: Callable[[str], None] = print,
    ):
        self.folder = folder.absolute()
        self.keep_last, self.keep_best, self.metric, self.mode = keep_last, keep_best, metric, mode
        self.warn = warn
        self.mirror: Mirror | None = None
        logging.getLogger("absl").addFilter(orbax_logs.is_news)
        orbax_patches.spare()
        orbax_patches.hush_late_writes()
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SPLIT_BYTES)
        handlers = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        )
        self._saver = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=handlers)
        )
        self._saving: Saving | None = None
        self._failures = SaveFailures()
        self._reach: state_tree.Reachable | None = None
        self._proven = False  # a save of this process has been read back
        self.newest: int | None = None  # the last one this process committed or restored; the same on every process

    # --- listing ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, oldest first."""
        return retention.committed(self.folder)

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def meta(self, step: int) -> dict:
        """Return the host's records in the checkpoint of `step`. Raises UserError if they are damaged."""
        folder = self.folder / str(step)
        return history_file.read(folder, manifest.read(folder))

    def problems(self, step: int) -> list[str]:
        """List the files that differ from what was written; empty for an intact checkpoint of this step and run.

        Raises UserError if it cannot be read.
        """
        folder = self.folder / str(step)
        found = manifest.problems(folder, step, manifest.run_of(self.folder.parent))
        missing = not (folder / ARRAYS / INDEX).is_file()
        return found or ([f"{ARRAYS}/{INDEX}: missing, so no array can be read"] if missing else [])

    def newest_good(self, set_aside: bool = True, copied: Sequence[int] = ()) -> int | None:
        """Return the step of the newest intact checkpoint, or None if there never was one. Warns of damaged newer ones,
        and renames them if `set_aside`. copied: steps in the mirror, which may be used too. Raises UserError if
        checkpoints exist and none of them is intact.
        """
        damaged: dict[int, str] = {}
        good = None
        here = self.steps()
        for step in sorted({*here, *copied}, reverse=True):
            found = self.problems(step) if step in here else []
            if step in here and not found:
                good = step
                break
            if step in copied and self._bring_back(step, found):
                return step
            if found:
                damaged[step] = found[0] + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        if good is None and (damaged or self._named(DAMAGED)):
            what = "; ".join(f"{step}: {why}" for step, why in damaged.items()) or "set aside as damaged"
            raise UserError(
                f"{self.folder}: holds checkpoints, but none is whole ({what}). Nothing is started over them: restore "
                "the folder from a copy, or choose another run.dir"
            )
        for step, why in damaged.items():
            aside = f"; it is now {step}{DAMAGED}" if set_aside and self._set_aside(step) else ""
            self.warn(f"CHECKPOINT {step} IS DAMAGED ({why}): going on from the one before it, step {good}{aside}")
        if good is None and self._named(PART):
            self.warn(f"{self.folder}: only a save that never finished; starting from step 0")
        return good

    def _bring_back(self, step: int, found: list[str]) -> bool:
        """Copy a checkpoint from the mirror, replacing a damaged one; copy all others too if none are left here."""
        assert self.mirror is not None
        lost = not self.steps()
        why = self.mirror.bring_back(step, self._set_aside) if found else self.mirror.bring_back(step)
        if why:
            self.warn(f"CHECKPOINT {step} of the mirror {self.mirror.place} cannot be taken: {why}")
            return False
        self.warn(
            f"CHECKPOINT {step} comes from the mirror {self.mirror.place}: the run folder "
            + (f"holds a damaged one ({found[0]}), now {step}{DAMAGED}" if found else "has none as new")
        )
        if lost:
            self.mirror.bring_back_identity()
        for other in self.mirror.steps() if lost else ():
            if other != step and (why := self.mirror.bring_back(other)):
                self.warn(f"CHECKPOINT {other} of the mirror {self.mirror.place} cannot be taken: {why}")
        return True

    def _named(self, suffix: str) -> list[pathlib.Path]:
        return sorted(self.folder.glob(f"*{suffix}")) if self.folder.is_dir() else []

    def _set_aside(self, step: int) -> bool:
        target = self.folder / f"{step}{DAMAGED}"
        try:
            plain_files.delete(target)
            (self.folder / str(step)).rename(target)
        except OSError:
            return False  # the folder cannot be written: the next save reports it
        return True

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, state: TrainState, step: int, meta: dict, at_once: bool = False) -> None:
        """Start writing; return when the arrays are copied off the device. First waits for the previous save, if any.

        A failed save is reported; later ones are skipped until a retry is due (`retry_due`), unless `at_once`. With
        several processes, which save together, none is skipped.
        """
        self.wait()
        if step == self.newest:
            self._renew(step, meta)
            return
        if self._failures.count and not self.retry_due and not at_once and jax.process_count() == 1:
            return
        meta, history = history_file.split(meta)
        meta = copy.deepcopy(meta)  # the run keeps changing its own
        saving = self._saving = Saving(step, next(_saves), share=stream_places.share(meta.get("stream")))
        try:
            self._clear_part(step)
            tree = state_tree.as_tree(state)
            if jax.process_count() == 1:
                self._check_room(step, tree)
            self._reach = self._reach or self._reachable()
            place = self._reach.path / self._part(step).name / ARRAYS
            self._saver.save(place, args=ocp.args.PyTreeSave(tree), force=True)
            saving.unproven = None if self._proven else jax.tree.map(_shape_of, state)
        except Exception as error:
            saving.error = reason_of(error)
        saving.thread = threading.Thread(target=self._commit, args=[saving, meta, history], name="jaxtrain-commit")
        saving.thread.start()

    def _reachable(self) -> state_tree.Reachable:
        self.folder.mkdir(parents=True, exist_ok=True)
        return state_tree.Reachable(self.folder)

    def _check_room(self, step: int, tree: dict[str, Any]) -> None:
        """Raise OSError if the disk is too full, before anything is written."""
        self._part(step).mkdir(parents=True)
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) + FORMAT_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"No space left on device ({free:,} bytes free, {needed:,} wanted)")

    def wait(self) -> bool:
        """Wait until the last save is committed and verified and older ones are pruned; return False if it failed."""
        saving, self._saving = self._saving, None
        if saving is None:
            return self._failures.count == 0
        saving.thread.join()
        if saving.error and is_lasting(saving.error):
            raise SaveError(
                f"{self.folder}: the checkpoint of step {saving.step} cannot be saved: {saving.error}. Trying again "
                f"would not mend that. The last good one is {self._last_good()}"
            )
        if saving.error:
            pause = self._failures.note()
            self.warn(
                f"CHECKPOINT {saving.step} COULD NOT BE WRITTEN to {self.folder}: {saving.error}. The last good one is "
                f"{self._last_good()}; the next try is in {pause:.0f} s"
            )
            return False
        self.newest = saving.step
        self._failures.forget()
        return True

    def settle(self) -> None:
        """Wait for a save under way in a run that has failed, so that nobody writes to the folder once it is unlocked.
        With several processes it goes on in the background: it would wait for ever for one that has died."""
        if jax.process_count() == 1:
            try:
                self.wait()
            except SaveError as error:  # the error that ends the run is the one to raise
                self.warn(str(error))

    def poll(self) -> None:
        """Process the result of the last save if it has ended, and the mirror's failures; does not wait."""
        if self._saving is not None and not self._saving.thread.is_alive():
            self.wait()
        for failure in () if self.mirror is None else self.mirror.take_failures():
            self.warn(failure)

    def wait_for_mirror(self, patience_s: float, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the mirror is up to date, `patience_s` have passed, or `give_up` returns True."""
        if self.mirror is not None and jax.process_index() == 0:
            self.mirror.wait(patience_s, give_up)
            self.poll()

    @property
    def retry_due(self) -> bool:
        """Return True if a failed save is due for a retry at any step. Only with one process: several save together."""
        return jax.process_count() == 1 and self._saving is None and self._failures.due

    def save_for_sure(self, state: TrainState, step: int, meta: dict, patience_s: float) -> None:
        """Save and wait, retrying for up to `patience_s`. Raises SaveError if the checkpoint cannot be written."""
        deadline = time.monotonic() + patience_s
        self.wait()
        self._failures.shorten()
        while True:
            self.save(state, step, meta, at_once=True)
            if self.wait():
                return
            left = deadline - time.monotonic()
            if left <= 0 or jax.process_count() > 1:
                raise SaveError(
                    f"{self.folder}: the checkpoint of step {step} could not be written for {patience_s:g} s "
                    f"(checkpoint.retry_s). The last good one is {self._last_good()}; make room there and start the "
                    "same command again to go on from it"
                )
            time.sleep(min(left, self._failures.pause_s))

    def _commit(self, saving: Saving, meta: dict, history: dict[str, list]) -> None:
        """Run in a thread: wait for all processes' arrays, then seal, rename, verify and prune."""
        try:
            self._saver.wait_until_finished()
        except Exception as error:
            saving.error = saving.error or reason_of(error)
        try:
            if jax.process_index() == 0:
                hear_others(saving)
                if not saving.error:
                    if saving.unproven is not None and jax.process_count() == 1:
                        state_tree.check_restores(self._part(saving.step) / ARRAYS, saving.unproven)
                        self._proven = True
                    if any(saving.others):
                        meta["stream"] = stream_places.merged(meta["stream"], saving.others)
                    self._finish(saving.step, meta, history)
                else:
                    self._clear_part(saving.step)
        except Exception as error:
            saving.error = reason_of(error)
            with contextlib.suppress(OSError):
                self._clear_part(saving.step)
        host_memory.give_back()  # frees the arrays' host copies
        agree(saving)

    def _finish(self, step: int, meta: dict, history: dict[str, list]) -> None:
        part, final = self._part(step), self.folder / str(step)
        manifest.write(part, meta | history_file.write(part, history))
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        found = self.problems(step)
        if found:
            self._set_aside(step)
            raise OSError(f"read back, it is not what was written: {found[0]}")
        self._prune()
        if self.mirror is not None:
            self.mirror.update(step)

    def _renew(self, step: int, meta: dict) -> None:
        """Update the host's records of a saved step; its arrays are unchanged, but it may have been evaluated since."""
        if jax.process_index() != 0:
            return
        folder = self.folder / str(step)
        meta, history = history_file.split(meta)
        saved = manifest.read(folder)
        meta |= {name: saved[name] for name in ("stream",) if name in saved}  # the positions of all processes
        meta |= history_file.after(history, saved.get(history_file.WRITTEN, {}))
        if manifest.renew(folder, meta):
            self._prune()
        if self.mirror is not None:
            self.mirror.update(step)

    def _part(self, step: int) -> pathlib.Path:
        return self.folder / f"{step}{PART}"

    def _clear_part(self, step: int) -> None:
        if jax.process_index() == 0:
            plain_files.delete(self._part(step))

    def _last_good(self) -> str:
        return "none" if self.newest is None else f"step {self.newest}"

    def _ranked(self) -> list[int]:
        return retention.ranked(self.folder, self.steps(), self.metric, self.mode)

    def prune(self, keep_last: int | None = None, keep_best: int | None = None) -> list[str]:
        """Delete checkpoints not to be kept, unfinished ones and damaged ones; return the deleted folders' names.

        Damaged checkpoints do not count. Raises UserError, and deletes nothing, if no checkpoint is intact.
        """
        whole = [step for step in self.steps() if not self.problems(step)]
        if not whole:
            raise UserError(f"{self.folder}: no checkpoint is whole, so none is deleted")
        last = whole[-(self.keep_last if keep_last is None else keep_last) :]
        ranked = [step for step in self._ranked() if step in whole]
        kept = {*last, *ranked[: self.keep_best if keep_best is None else keep_best]}
        names = [str(step) for step in self.steps() if step not in kept]
        names += [path.name for path in (*self._named(PART), *self._named(DAMAGED))]
        for name in names:
            retention.remove(self.folder, name)
        return names

    def _prune(self) -> None:
        """Prune after a save, without verifying again: every checkpoint was verified when it was saved."""
        kept = {*self.steps()[-self.keep_last :], *self._ranked()[: self.keep_best]}
        for step in self.steps():
            if step not in kept and not (self.mirror is not None and self.mirror.defers(step)):
                retention.remove(self.folder, str(step))

    def clear_unfinished(self) -> list[pathlib.Path]:
        """Delete what killed saves have left; no save may be in progress."""
        left = self._named(PART)
        for path in left:
            plain_files.delete(path)
        return left

    # --- restoring ----------------------------------------------------------------------------------------------

    def restore(self, step: int, like: TrainState, optimizer: bool = True) -> TrainState:
        """Return the state of `step`, with shapes, dtypes and shardings as in `like` (any mesh).

        optimizer: False leaves the optimizer's state out.
        Raises UserError, listing the differences, if the checkpoint is of another model or optimizer.
        """
        self.newest = step
        return state_tree.restore(self.folder / str(step) / ARRAYS, like, optimizer)

    def restore_parts(self, step: int, parts: dict[str, Any], sharding) -> dict[str, Any]:
        """Return only these parts of a checkpoint (weights without the optimizer), every array on `sharding`."""
        return state_tree.restore_parts(self.folder / str(step) / ARRAYS, parts, sharding)

    def restore_weights(self, step: int, sharding) -> dict[str, Any]:
        """Return the weights, and their averages, by name; no model is needed."""
        return state_tree.restore_weights(self.folder / str(step) / ARRAYS, sharding)


def _shape_of(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
