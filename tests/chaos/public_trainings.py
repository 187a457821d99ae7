# ruff: noqa: E501  # tables of settings read better in whole lines
"""Train small trainings of public code in torch and under `jaxtrain.compile`; compare the losses of twenty steps.

    python -m tests.chaos.public_trainings [NAME ...] [--json F] [--page docs/public_trainings.md]

One line per training: `one program`, `in torch` (right, but torch ran the steps), `refused`, or `WRONG`; the largest
relative difference of a loss, the number of compiled programs, and the reason of whatever did not compile. Exit status 1
if a training is WRONG. --page writes the table of the docs.
"""

import argparse
import json
import logging
import pathlib
import sys
import time
import warnings
from typing import Any

import jax
import torch

import jaxtrain
from jaxtrain.errors import UserError
from tests.chaos.trainings import FIELDS, FOLLOWS, TRAININGS, Training
from torch_bridge.torchvision_operators import declare_torchvision

TOLERANCE = 1e-4


class Lines(logging.Handler):
    """Collects log lines: what ran in torch and why, and XLA's compilations of steps."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.in_torch: list[str] = []
        self.compilations = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.name.startswith("jax."):
            self.compilations += "Finished XLA compilation of jit(" in line
        elif "in torch" in line or "torch runs" in line or "torch ran" in line:
            self.in_torch.append(line)


def torch_losses(training: Training) -> list[float]:
    """Train in torch; return the losses of each step and update."""
    losses = []
    for batch in training.batches:
        for update in training.updates.values():
            update.optimizer.zero_grad()
            result = update.loss(*training.modules.values(), batch)
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
            update.optimizer.step()
            if update.scheduler is not None:
                update.scheduler.step()
            losses.append(loss.item())
        if training.after is not None:
            training.after(training.modules)
    return losses


def compiled_losses(training: Training) -> list[float]:
    """Train with compiled steps; return the losses of each step and update."""
    if len(training.modules) == len(training.updates) == 1:
        (module,), (update,) = training.modules.values(), training.updates.values()
        steps = [jaxtrain.compile(module, update.loss, update.optimizer, update.scheduler)]
    else:
        updates = {name: (u.loss, u.optimizer, u.scheduler) for name, u in training.updates.items()}
        made = jaxtrain.compile_many(training.modules, updates)
        steps = [made[name] for name in updates]
    losses = []
    for batch in training.batches:
        for step in steps:
            result = step(batch)
            losses.append(float(result[0] if isinstance(result, tuple) else result))
        if training.after is not None:
            training.after(training.modules)
    return losses


def judge(name: str, lines: Lines) -> dict[str, Any]:
    """Train `name` in both; return the verdict, the largest relative difference, programs, seconds and the reason."""
    make = TRAININGS[name]
    want = torch_losses(make())
    lines.in_torch.clear()
    lines.compilations, began = 0, time.process_time()
    try:
        got = compiled_losses(make())
    except UserError as error:
        return {"verdict": "refused", "why": str(error), "difference": None, "programs": 0}
    difference = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(got, want, strict=True))
    verdict = "in torch" if lines.in_torch else "one program"
    return {
        "verdict": verdict if difference <= TOLERANCE else "WRONG",
        "difference": difference,
        "programs": lines.compilations,
        "seconds": round(time.process_time() - began, 1),
        "why": lines.in_torch[-1] if lines.in_torch else "",
    }


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page of the docs."""
    equal = [row for row in results.values() if row["verdict"] in ("one program", "in torch")]
    compiled = [row for row in equal if row["verdict"] == "one program"]
    rows = [
        f"| {FIELDS[name].replace('_', ' ')} | {name.replace('_', ' ')} | {FOLLOWS[name]} | {row['verdict']} | "
        f"{'' if row['difference'] is None else format(row['difference'], '.0e')} | {row['why'].replace('|', '/')} |"
        for name, row in results.items()
    ]
    return "\n".join(
        [
            "# Public trainings",
            "",
            "`python -m tests.chaos.public_trainings --page docs/public_trainings.md` wrote this page.",
            "",
            f"Each row trains for 20 steps with random weights and synthetic data, in torch {torch.__version__} and under "
            f"`jaxtrain.compile` (jax {jax.__version__}). The code has the form of the public project that it names. "
            f"{len(equal)} of {len(results)} have torch's losses to {TOLERANCE:.0e}; {len(compiled)} run compiled throughout.",
            "",
            "*One program* means that each update is compiled whole. *In torch* means that torch ran the steps, with the "
            "line that says why. The difference is the largest relative one of a loss.",
            "",
            "| field | training | follows | result | difference | why not compiled |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", metavar="F", help="write the results as JSON")
    parser.add_argument("--page", metavar="F", help="write the docs page")
    arguments = parser.parse_args(argv)
    load()
    lines = Lines()
    for name in ("torch_bridge", "jaxtrain", "jax._src.dispatch", "jax._src.interpreters.pxla", "jax._src.compiler"):
        logging.getLogger(name).addHandler(lines)
        logging.getLogger(name).propagate = False
    jax.config.update("jax_log_compiles", True)
    results = {}
    for name in arguments.names or TRAININGS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = results[name] = judge(name, lines)
        off = "" if row["difference"] is None else f"{row['difference']:.1e}"
        print(f"{name:22s} {row['verdict']:12s} {off:8s} {row['programs']} programs  {row['why']}", flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    if arguments.page:
        pathlib.Path(arguments.page).write_text(page(results))
    return int(any(row["verdict"] == "WRONG" for row in results.values()))


def load() -> None:
    """Import every training."""
    declare_torchvision()  # the registry's build of torchvision, which timm and transformers import, wants CUDA
    from tests.chaos.trainings import (  # noqa: F401
        audio_and_series,
        generative,
        recommendation,
        reinforcement,
        science,
        text,
        vision,
    )


if __name__ == "__main__":
    sys.exit(main())
