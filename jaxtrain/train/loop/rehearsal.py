"""`train.fast_dev_run`: run one batch of everything, in a temporary folder."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import jax

from jaxtrain.config import TrainingConfig
from jaxtrain.runtime.launch import broadcast_from_process_zero
from jaxtrain.train.program import Program

NOTE = "train.fast_dev_run: one batch of training and of evaluation; nothing is kept"


def shortened(config: TrainingConfig) -> TrainingConfig:
    """Return the config of a run with one step and one evaluation, without trackers."""
    changes = {
        "train": {"steps": 1, "steps_per_call": 1, "log_every_steps": 1},
        "evaluation": {"every_steps": 1, "patience": None},
        "tracking": {"tensorboard": False, "wandb": False, "mlflow": False, "histograms_every_steps": None},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


@contextlib.contextmanager
def folder_of(program: Program) -> Iterator[None]:
    """Return a context in which a program's run folder is a temporary one, shared by all processes."""
    named = program.config.run
    made = broadcast_from_process_zero("rehearsal", lambda: tempfile.mkdtemp(prefix="jaxtrain-rehearsal-"))
    program.config = program.config.model_copy(update={"run": named.model_copy(update={"dir": made})})
    try:
        yield
    finally:
        program.config = program.config.model_copy(update={"run": named})
        if jax.process_index() == 0:
            shutil.rmtree(made, ignore_errors=True)
