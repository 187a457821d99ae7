"""What the contract tests share: every discovered task at its tiny size."""

import functools
import logging
import pathlib
import tempfile
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxtrain import config_io
from jaxtrain.task import find_task, task_names
from jaxtrain.train.trainer import Trainer
from tests.chaos.runs import points

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
TINY = {  # configs/<name>.yaml that trains the task on a CPU in seconds
    "criteria_evidence.criteria": "criteria_tiny",
    "criteria_evidence.evidence": "evidence_tiny",
    "criteria_evidence.joint": "joint_tiny",
    "criteria_evidence.share": "share_tiny",
    "digits.classify": "digits_tiny",
    "fmri_autoencoder.gen1": "sherlock_gen1_tiny",
    "fmri_autoencoder.head": "sherlock_head_tiny",
    "hjepa.pretrain": "hjepa_tiny",
    "hjepa.world_model": "hjepa_world_tiny",
    "memory_lm.adapter": "memory_lm_adapter_tiny",
    "memory_lm.scratch": "memory_lm_micro",
    "set_completion.complete": "splat_tiny",
    "set_completion.sae": "splat_sae_tiny",
    "torch_module.train": "torch_module_tiny",
}
TASKS = task_names()  # one without an entry above fails every contract test
PLAIN = (  # Adam would blow rounding up to the learning rate, and warm-up would leave the first step without one
    "optim.name=sgd",
    "optim.lr=0.01",
    "optim.schedule.name=constant",
    *(f"optim.schedule.warmup_{unit}=null" for unit in ("steps", "epochs", "ratio")),
)
WHOLE = (  # evaluated and saved twice in the middle of an epoch
    "train.steps=36",
    "train.log_every_steps=1",
    "evaluation.every_epochs=null",
    "evaluation.every_steps=13",
)
EXACT = [name for name in TASKS if not find_task(name).couples_samples]
PADDED = [name for name in TASKS if find_task(name).pads_batches]
ONE_OF_EACH_SYSTEM = list({name.partition(".")[0]: name for name in reversed(TASKS)}.values())


def each(names: list[str]) -> pytest.MarkDecorator:
    """Parametrize a test by task; `make test` takes digits.classify, `make test-all` every task."""
    slow = lambda name: () if name == "digits.classify" else (pytest.mark.slow,)
    return pytest.mark.parametrize("name", [pytest.param(name, marks=slow(name)) for name in names])


def tiny_file(name: str) -> pathlib.Path:
    return CONFIGS / f"{TINY[name]}.yaml"


def tiny(name: str, folder: pathlib.Path, *overrides: str, **options) -> Trainer:
    """A trainer of the task's tiny config in `folder`, on one of the fake devices and a step a call unless told
    otherwise: tests that change neither model nor optimizer share one compiled step."""
    settings = ["tracking.tensorboard=false", "run.quiet=true", "shard.devices=1", "train.steps_per_call=1"]
    settings = [f"run.dir={folder}", *settings, *overrides]
    task, config = config_io.load(tiny_file(name), settings)
    return Trainer(config=config, task=task, **options)


@functools.cache
def untrained(name: str) -> Trainer:
    """A trainer of four rows a batch, read one by one: for all who look at its model, and leave it as it was."""
    rows = ("data.batch_size=4", "data.eval_batch_size=16", "data.placement=host")
    return tiny(name, pathlib.Path("never-written"), *rows)


class Run(NamedTuple):
    losses: list[float]  # of every step
    compiled: list[str]  # what jax said that it compiled
    placed: list  # traced values that were asked where they lie
    parameters: dict
    moments: dict
    points: list


@functools.cache
def whole_run(name: str) -> Run:
    """An uninterrupted run with the settings WHOLE, which several claims are about."""
    said = logging.Handler()
    said.emit = lambda record: compiled.append(record.getMessage())
    compiled, placed = [], []
    with tempfile.TemporaryDirectory() as folder, jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.core.Tracer, "sharding", property(placed.append))
        trainer = tiny(name, pathlib.Path(folder), *WHOLE)
        logging.getLogger("jax").addHandler(said)
        try:
            trainer.train()
        finally:
            logging.getLogger("jax").removeHandler(said)
        logged = points(pathlib.Path(folder))
    losses = [values["loss"] for _, split, values in logged if split == "train"]
    return Run(losses, compiled, placed, final_parameters(trainer), flat(trainer.state.opt_state), logged)


class FourSteps(NamedTuple):
    """Four steps of SGD: the losses, the weights after them, and by how much these moved."""

    losses: list[float]
    weights: dict
    moved: dict


def four_steps(name: str, folder: pathlib.Path, *overrides: str) -> FourSteps:
    """Train the task's tiny config on batches of 16, with settings that split it otherwise."""
    few = ("train.steps=4", "train.log_every_steps=1", "evaluation.every_epochs=null", "evaluation.every_steps=null")
    trainer = tiny(name, folder, *few, "data.batch_size=16", *PLAIN, *overrides)
    start = final_parameters(trainer)
    trainer.train()
    done = final_parameters(trainer)
    losses = [values["loss"] for _, split, values in points(folder) if split == "train"]
    return FourSteps(losses, done, {key: done[key].astype(float) - start[key] for key in done})


def flat(tree) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}


def final_parameters(trainer: Trainer) -> dict[str, np.ndarray]:
    state = trainer.state
    return jax.device_get({**state.params, **state.frozen, **state.buffers})


def assert_equal(first: dict, second: dict) -> None:
    """Bit for bit."""
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)


def largest_relative_difference(first: dict, second: dict) -> float:
    """Relative L2 over all arrays together."""
    difference = sum(float(np.sum(np.square(first[k].astype(float) - second[k].astype(float)))) for k in first)
    size = sum(float(np.sum(np.square(value.astype(float)))) for value in first.values())
    return (difference / max(size, 1e-30)) ** 0.5
