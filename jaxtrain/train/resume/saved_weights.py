"""The part of Trainer that brings saved weights back: of the run's best checkpoint, and of `init_from`."""

import pathlib
import weakref
from collections.abc import Callable
from typing import Any

from jaxtrain.train.checkpoint import best, init_from
from jaxtrain.train.checkpoint.best import SavedCheckpoint
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.program import Program
from jaxtrain.train.resume import origin
from jaxtrain.train.resume.fingerprint import Fingerprint
from jaxtrain.train.step.state import TrainState


class SavedWeights:
    """Base of Trainer, which has the attributes below.

    exported: the file of the best weights that `train` has written, run folder/exports/best.pt; None before.
    """

    program: Program
    fingerprint: Fingerprint
    checkpoints: Callable[[], Checkpoints]
    write_back: Callable[[], None]
    _edits: Any
    _fingerprint: Fingerprint | None

    def begin_fresh(self, abstract: bool = False) -> None:
        """Note that nothing has been trained or loaded. abstract: there are no weights."""
        self.exported: pathlib.Path | None = None
        self.export_failure = ""  # why it is None, once a run has ended
        self._begun = False  # the run folder is this run's
        self._warm: init_from.WarmStart | None = None
        self._note_initial(not abstract)

    def _note_initial(self, fresh: bool) -> None:
        self._initial: weakref.ref[TrainState] | None = weakref.ref(self.program.state) if fresh else None

    @property
    def best(self) -> SavedCheckpoint | None:
        """Return step, metrics and path of this run's best checkpoint by evaluation.metric; None if there is none.

        Raises UserError if a named run folder holds another run, or the best checkpoint was not kept.
        """
        if not self._begun:
            self._choose_folder()
        checkpoints = self.checkpoints()
        return None if checkpoints.best() is None else best.find(checkpoints, "best")

    def load_best(self) -> SavedCheckpoint:
        """Load the weights of this run's best checkpoint; see `load_checkpoint`."""
        return self.load_checkpoint("best")

    def load_checkpoint(self, which: str | int = "best") -> SavedCheckpoint:
        """Load the weights and buffers of a checkpoint of this run, and write them into the model that was passed.

        which: "best" by evaluation.metric, "last", or a step. `state_dict`, `model`, `evaluate` and the torch module
        then have these weights; an optimizer stays as it is, and `train` goes on from the newest checkpoint. A script
        started again finds its run folder as `train` does. All processes of a run call it. Returns step, metrics and
        path. Raises UserError if there is no such checkpoint, it is damaged, or the folder holds another run.
        """
        if not self._begun:
            self._take_edits()
            self._choose_folder()
        loaded = best.load(self.program, self.checkpoints(), str(which))
        self._begun = True
        self.write_back()
        return loaded

    def _choose_folder(self) -> None:
        """Set the run folder to the one that `train` would go on in."""
        for line in origin.choose_folder(self.program, self.fingerprint, "auto", False):
            print(line)

    def _take_edits(self) -> None:
        """Load what the torch module holds now, if it was changed outside a run."""
        fresh = self._is_fresh()
        if self._edits is not None and self._edits.take_over(self.program):
            self._fingerprint = None
            self._note_initial(fresh)

    def _take_weights(self) -> None:
        """Load what the torch module holds now; before a run begins, also the weights of `init_from`."""
        self._take_edits()
        if self._is_fresh() and self.program.config.init_from is not None:
            _ = self.fingerprint  # of the run with its first weights
            self._warm_start()
            self.write_back()

    def _is_fresh(self) -> bool:
        """Return True if the state is the initial one."""
        return self._initial is not None and self._initial() is self.program.state

    def _warm_start(self) -> init_from.WarmStart | None:
        """Load the weights of `init_from`, once; return what it has loaded, None without the setting."""
        if self._warm is None and self.program.config.init_from is not None:
            self._warm = init_from.apply(self.program, self.program.config.init_from)
        return self._warm
