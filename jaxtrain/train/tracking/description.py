"""Describe a run in a few lines: parameters, samples, steps, optimizer, mesh, folder."""

import pathlib

from jaxtrain.data.sources import describe_size
from jaxtrain.optim import groups
from jaxtrain.train.program import Program
from jaxtrain.train.step.init_state import members


def describe(program: Program, what: str, folder: pathlib.Path) -> str:
    """Return a description of the run in a few lines. what: the task or the model. folder: the run folder."""
    state, config, layout = program.state, program.config, program.layout
    trained = sum(value.size for value in state.params.values())
    fixed = sum(value.size for value in state.frozen.values())
    splits = {name: program.data.source(name) for name in ("train", "validation", "test")}
    sizes = ", ".join(f"{name} {describe_size(source)}" for name, source in splits.items() if source is not None)
    given = program.given
    optimizer = "" if given is None else f"optimizer: {given.describe()}\n"
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.shape.items())
    optim = config.optim
    if given is None and (optim.groups or optim.layer_decay is not None):
        arrays = {**state.params, **state.frozen}
        found = members(program.task, config, program.model())
        lines = groups.describe(optim, found, {key: arrays[key].size for key in found})
        optimizer = "".join(f"{line}\n" for line in lines)
    return (
        f"{what}: {trained:,} trained parameters, {fixed:,} frozen\n"
        f"samples: {sizes}\n"
        f"steps: {program.total_steps:,} of {config.data.batch_size} samples, "
        f"{program.steps_per_epoch:,} per epoch\n"
        f"{optimizer}mesh: {mesh} ({layout.strategy}), precision {config.precision.policy}\n"
        f"run folder: {folder}"
    )
