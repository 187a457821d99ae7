"""Train small models of public kinds in torch and compiled: `python -m benchmarks.public_trainings`.

Prints a row per training: what was compiled, what ran in torch and why, and how far the losses of 20 steps are from
torch's. The figures go into benchmarks/results/public_trainings.json, where they stay until measured `--again`, and
into docs/public_trainings.md.
"""

import argparse
import copy
import importlib
import json
import logging
import os
import pathlib
import random
import re
import time
import traceback
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks import public_trainings
from benchmarks.public_trainings import ENTRIES, FAMILIES, STEPS, Entry

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parent / "results/public_trainings.json"
PAGE = HERE.parents[1] / "docs/public_trainings.md"
LIMIT = 1e-4
TIMES = re.compile(r" is (captured|recorded|compiled)\b")  # how long something takes is no reason
UNOPTIMISED = "--xla_backend_optimization_level=0"
TEXT = """# Public trainings

What becomes of trainings as public repositories have them: {count} of the {all} small ones in the benchmark, with
random weights and synthetic data, each for {steps} steps in torch and under jaxtrain, float32 on a CPU.

"Difference" is the largest of
abs(jaxtrain's loss - torch's) / max(1, abs(torch's)) over the steps; {near} are within {limit:g}. {compiled} run
compiled: TorchDynamo captures the loss, and one program computes it, its gradients and the update. In {fallen}, torch
runs the loss and the update of each step ("torch"), around compiled modules if those can be captured, or of some steps
("in part"), for the reason that the run gives; {refused} are refused before the first step.

`python -m benchmarks.public_trainings` makes this page; the code of each training is in `benchmarks/public_trainings/`,
one file per family. What a loss draws (noise, crops, negative samples) comes with its batch, so that both sides have
the same numbers. Programs are compiled without XLA's optimisations here; `--optimised` compiles as a run does.
[A certificate](verify.md) tests your own training in the same way.

"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="a family, or a part of a training's name; several with commas between",
    )
    p.add_argument("--again", action="store_true", help="measure also what benchmarks/results holds already")
    p.add_argument("--optimised", action="store_true", help="compile as in a user's run, three times as long")
    arguments = p.parse_args()
    if not arguments.optimised:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNOPTIMISED}".strip()
    os.environ.setdefault("JAXTRAIN_WAIT", "1")  # else torch computes the first steps while XLA compiles
    torch.set_num_threads(1)
    named = arguments.only.split(",")
    for entry in entries([family for family in FAMILIES if family in named] or FAMILIES):
        if entry.family not in named and not any(text in entry.name for text in named):
            continue
        if entry.name in measured() and not arguments.again:
            continue
        started = time.process_time()
        row = measure(entry)
        row["cpu_s"] = round(time.process_time() - started, 1)
        row["why"] = re.sub(r"/\S*/(?:site-packages/|(?=benchmarks/))", "", row["why"])  # of any machine
        RESULTS.write_text(json.dumps(measured() | {entry.name: row}, indent=1) + "\n")
        print(f"{entry.name:32s} {row['how']:9s} {row['difference']}  {row['cpu_s']} s  {row['why']}", flush=True)
    known = measured()
    PAGE.write_text(page({entry.name: known[entry.name] for entry in entries(FAMILIES) if entry.name in known}))


def entries(families: Sequence[str]) -> list[Entry]:
    """Return the trainings of these families, in order. Imports their files, and so the libraries that they use."""
    for family in families:
        importlib.import_module(f"benchmarks.public_trainings.{family}")
    return sorted(
        (entry for entry in ENTRIES if entry.family in families), key=lambda entry: FAMILIES.index(entry.family)
    )


def measured() -> dict[str, dict]:
    """Return the rows so far; another process may have added some."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def measure(entry: Entry) -> dict:
    """Train on both sides; return how ours ran, why not compiled, and the largest difference of the losses."""
    heard = Heard()
    logging.getLogger("jaxtrain").addHandler(heard)
    try:
        theirs = seeded(lambda: entry.script("torch") if entry.script else train_in_torch(entry.make()))
        try:
            ours, how, why = seeded(lambda: compiled(entry))
        except Exception as error:  # a refusal is a result; a traceback is for whoever runs this
            if not hasattr(error, "args") or type(error).__name__ not in ("UserError", "CannotConvert"):
                traceback.print_exc()
            text = str(error).split("\n")[0] or type(error).__name__
            return {"how": "refused", "why": text[:300], "difference": None, "graphs": 0}
    finally:
        logging.getLogger("jaxtrain").removeHandler(heard)
    if len(ours) != len(theirs):
        return {
            "how": "refused",
            "why": f"{len(ours)} losses instead of {len(theirs)}",
            "difference": None,
            "graphs": 0,
        }
    far = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))
    why = why or heard.reason()
    how = "in part" if why and how == "compiled" else how
    return {"how": how, "why": why, "difference": float(f"{far:.1e}"), "last_loss": theirs[-1]}


def seeded(run):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return run()


def train_in_torch(it: public_trainings.Training) -> list[float]:
    modules, losses = list(it.modules.values()), []
    for step in range(STEPS):
        batch = copy.deepcopy(it.batches[step % len(it.batches)])
        for name, loss_fn in it.losses.items():
            it.optimizers[name].zero_grad()
            loss = loss_fn(*modules, batch)
            loss.backward()
            it.optimizers[name].step()
            losses.append(loss.item())
        if it.after is not None:
            it.after(*modules)
    return losses


def compiled(entry: Entry) -> tuple[list[float], str, str]:
    """Return the losses, how the steps ran, and the reason where they are not compiled."""
    if entry.script:
        return entry.script("jax"), "compiled", ""
    import jaxtrain
    from jaxtrain.compiled_step import step as compiled_step

    compiled_step.PATIENCE_STEPS = (
        10**9
    )  # when compiling is given up depends on the machine's load, not on the training
    it = entry.make()
    updates = {name: (loss, it.optimizers[name]) for name, loss in it.losses.items()}
    steps = jaxtrain.compile_many(it.modules, updates)
    losses = []
    for step in range(STEPS):
        batch = copy.deepcopy(it.batches[step % len(it.batches)])
        losses += [float(steps[name](batch)) for name in updates]
        if it.after is not None:
            it.after(*it.modules.values())
    told = [steps[name].explain() for name in updates]
    reasons = [
        line.split("torch runs it: ", 1)[1] for text in told for line in text.splitlines() if "runs it: " in line
    ]
    if reasons:
        return losses, "torch", reasons[0]
    return losses, "compiled", ""


class Heard(logging.Handler):
    """The warnings of a run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def reason(self) -> str:
        found = [line for line in self.lines if "torch" in line and not TIMES.search(line)]
        return found[0].splitlines()[0][:300] if found else ""


def page(known: dict[str, dict]) -> str:
    ran = [row for row in known.values() if row["how"] != "refused"]
    counts = {
        "count": len(known),
        "all": len(ENTRIES),
        "steps": STEPS,
        "limit": LIMIT,
        "near": sum(row["difference"] <= LIMIT for row in ran),
        "compiled": sum(row["how"] == "compiled" for row in ran),
        "fallen": sum(row["how"] in ("torch", "in part") for row in ran),
        "refused": len(known) - len(ran),
    }
    lines = ["| family | training | what is in it | ran | difference | reason |", "|---|---|---|---|---|---|"]
    for entry in (entry for entry in entries(FAMILIES) if entry.name in known):
        row = known[entry.name]
        far = "" if row["difference"] is None else f"{row['difference']:.0e}"
        why = row["why"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {entry.family} | {entry.name} | {entry.detail} | {row['how']} | {far} | {why} |")
    return TEXT.format(**counts) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
