"""Replay one step and look at every result: `python -m jaxtrain.debug --run runs/digits --step 12`."""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import commands
from jaxtrain.errors import UserError

SHOWN = 12  # most samples or parameters to list


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "debug",
        "Replay a step of a run from the nearest checkpoint; name the first module whose output or gradient is not "
        "finite, or departs from torch's.",
        "python -m jaxtrain.debug --run runs/digits --step 12",
    )
    commands.add_run(p)
    p.add_argument("--step", required=True, type=commands.count(), metavar="N", help="the step, as messages count it")
    commands.add_json(p)
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    commands.quiet_jax()
    from jaxtrain import config_io
    from jaxtrain.train import run_dir
    from jaxtrain.train.trainer import Trainer

    folder = pathlib.Path(arguments.run)
    run_dir.open_run(folder)
    task, config = config_io.load(folder / "config.yaml", [f"run.dir={folder}"])
    findings = examine(Trainer(config=config, task=task), arguments.step)
    if not arguments.json:
        print(findings)
    arguments.found = {"run": str(folder), **dataclasses.asdict(findings)}
    return 0 if findings.fine else commands.FAILED


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings about one step. fine: everything is finite and torch agrees. samples: Dataset indices of the faulty
    samples."""

    step: int
    fine: bool
    samples: list[int]
    lines: list[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def examine(trainer: Any, step: int) -> Findings:
    """Replay step `step` (1-based) of a trainer's run folder from its nearest checkpoint, on one process.

    The step is computed in JAX, as the run did, and by torch, layer by layer. Changes the trainer's state. Raises
    UserError for a step that the run does not have.
    """
    import jax
    import numpy as np

    from jaxtrain.data import row_keys

    program = trainer.program
    if not 1 <= step <= program.total_steps:
        raise UserError(f"--step {step}: the run has steps 1 to {program.total_steps}")
    lines, batch = _replayed(trainer, step)
    loss, gradients = _jax_step(program, batch)
    strange = sorted(key for key, gradient in gradients.items() if not np.isfinite(gradient).all())
    lines.append(f"jax: loss {loss:g}; gradients that are not finite: {_listed(strange) or 'none'}")
    rows = _rows_of(program, batch)
    index = (
        np.asarray(rows[row_keys.INDEX]) if row_keys.INDEX in rows else program.train_loader.stream.batch(step - 1)[0]
    )
    samples: set[int] = set()
    weights = [key for key, v in program.state.params.items() if not np.isfinite(np.asarray(jax.device_get(v))).all()]
    if weights:
        lines.append(f"the weights are not finite before the step: {_listed(weights)}")
    for key, value in row_keys.without(rows).items():
        found = _strange_rows(value)
        if found.size:
            samples |= set(index[found].tolist())
            lines.append(f"the data are not finite: batch[{key!r}] of samples {_listed(sorted(samples))}")
    agrees = _in_torch(program, rows, index, lines, samples)
    fine = bool(np.isfinite(loss)) and not strange and not weights and not samples and agrees
    if samples:
        lines.append(f"samples: {_listed(sorted(samples))}")
    if fine:
        lines.append("loss and gradients are finite, and torch agrees")
    return Findings(step, fine, sorted(samples), lines)


def _replayed(trainer: Any, step: int) -> tuple[list[str], Any]:
    """Bring the trainer's state to just before the step; return a line about it, and the step's batch on the devices.

    Raises UserError if the data end before the step.
    """
    from jaxtrain.train.checkpoint import init_from

    program, checkpoints = trainer.program, trainer.checkpoints()
    before = [saved for saved in checkpoints.steps() if saved < step and not checkpoints.problems(saved)]
    scale = 1.0
    if before:
        meta = checkpoints.meta(before[-1])
        trainer.state = checkpoints.restore(before[-1], trainer.state)
        if meta.get("plateau"):
            scale = meta["plateau"]["lr"] / trainer.config.optim.lr
        if program.train_loader.batch_shapes is not None:
            program.train_loader.batch_shapes.restore(meta.get("batch_shapes") or (), meta["step"])
        origin = f"the checkpoint of step {before[-1]}"
    else:
        if trainer.config.init_from is not None:
            init_from.apply(program, trainer.config.init_from)
        origin = "the beginning"
    first = int(program.state.step)
    compiled, hyper = program.train_step(), program.hyper(scale)
    columns = program.columns(program.train_loader)
    batches = program.train_loader.batches((number, 1) for number in range(first, step))
    for number, _, batch in batches:
        if number == step - 1:
            program.data.close()
            return [f"step {step}: from {origin}, {step - 1 - first} steps run again"], batch
        program.state, _ = compiled(program.state, batch, hyper, columns)
    raise UserError(f"--step {step}: the data end before it")


def _jax_step(program: Any, batch: Any) -> tuple[float, Mapping[str, Any]]:
    """Return loss and gradients as the run's own step computes them."""
    import jax

    from jaxtrain.train.step import train_step

    gradients = train_step.make_gradients(
        program.task, program.resolved, program.model_def, program.precision, program.layout
    )
    columns = program.columns(program.train_loader)
    numbers = program.hyper()["numbers"]
    compute = program.jit(lambda state, batch: gradients(state, train_step.gather_parts(batch, columns), numbers))
    grads, loss, _, _ = jax.device_get(compute(program.state, batch))
    return float(loss.value), grads


def _rows_of(program: Any, batch: Any) -> dict[str, Any]:
    """Return the batch in numpy with rows along the first axis, its micro-batches joined."""
    import jax
    import numpy as np

    from jaxtrain.train.step.train_step import gather_parts

    parts = jax.device_get(gather_parts(batch, program.columns(program.train_loader)))
    flat = [jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), part) for part in parts]
    return dict(jax.tree.map(lambda *leaves: np.concatenate(leaves), *flat))


def _in_torch(program: Any, rows: Mapping[str, Any], index: Any, lines: list[str], samples: set[int]) -> bool:
    """Compute the step in the torch twin and compare. Return False if something is not finite or differs from torch."""
    task, config = program.task, program.config
    if task.twin is None or task.twin.loss is None:
        lines.append(f"torch: {config.task or 'this model'} has no torch twin with a loss to look into")
        return True
    import jax

    from torch_bridge import verification
    from torch_bridge.datasets import to_torch
    from torch_bridge.state_dict import state_dict
    from torch_bridge.training import faults

    model = program.model_def.merge(program.state.params, program.state.frozen, program.state.buffers)
    twin = task.twin.build(config)
    twin.load_state_dict({key: to_torch(value) for key, value in state_dict(model).items()}, strict=True)
    twin.train()
    faults.silence_dropout(twin)
    given = jax.tree.map(to_torch, dict(rows))
    found = faults.find(twin, lambda: task.twin.loss(twin, given, config), len(index))
    strange = _listed(found.gradients) or "none"
    lines.append(f"torch, without dropout: loss {found.loss:g}; gradients that are not finite: {strange}")
    for fault in (found.output, found.gradient):
        if fault is not None:
            lines.append(str(fault))
            samples |= set(index[list(fault.rows)].tolist())
    if found.output is not None or found.gradient is not None:
        return False
    twin.eval()
    report = verification.compare(task, config, model, twin, [rows])
    if report.first is not None:
        first = report.first
        lines.append(
            f"in evaluation mode the {first.kind} of {first.name} departs first from torch's: relative difference "
            f"{first.size:.1e}, accepted {first.limit:.0e}"
        )
    return report.first is None


def _strange_rows(value: Any) -> Any:
    """Return the indices of an entry's rows that are not finite."""
    import jax
    import numpy as np

    found = np.zeros(0, np.int64)
    for leaf in jax.tree.leaves(value):
        if np.issubdtype(leaf.dtype, np.floating):
            bad = ~np.isfinite(leaf).reshape(len(leaf), -1).all(1)
            found = np.union1d(found, np.flatnonzero(bad))
    return found


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(str(name) for name in names[:SHOWN]) + more


if __name__ == "__main__":
    commands.start(main)
