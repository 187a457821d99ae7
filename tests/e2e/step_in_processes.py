"""Loops around `jaxtrain.compile` without a wrapper, in one of several processes: a line of JSON each.
`python -m tests.e2e.step_in_processes CASE...` under a launcher."""

import json
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import UserError

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FSDP = {"shard": "fsdp"}
LOOPS = {
    "ddp": {},
    "fsdp": FSDP,
    "shard_grad_op": {"shard": "shard_grad_op"},
    "accumulation": FSDP | {"accumulate": 2},
    "bfloat16": FSDP | {"precision": "bf16"},
}
STEPS, ROWS = 20, 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.body = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 32)
        )  # statistics and masks are of the global batch

    def forward(self, ids):
        return self.body(self.table(ids).mean(1))


def loss(module, batch):
    value = F.cross_entropy(module(batch["ids"]), batch["y"].view(-1))
    return value, {"half": value.detach() / 2}


def batches(rows: int = ROWS) -> list[dict]:
    """Return this process's rows of each global batch."""
    draw = torch.Generator().manual_seed(0)
    wholes = [torch.randint(0, 32, (rows, 6), generator=draw) for _ in range(STEPS)]
    mine = slice(RANK * rows // WORLD, (RANK + 1) * rows // WORLD)
    return [{"ids": ids[mine], "y": ids[mine, :1].clone()} for ids in wholes]


def made(seed: int = 0, **options):
    torch.manual_seed(seed)
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    return module, jaxtrain.compile(module, loss, optimizer, schedule, clip_norm=1.0, wait=True, **options)


def trained(options: dict, rows: int = ROWS) -> dict:
    module, step = made(RANK, **options)  # other first weights in each process: those of process 0 count
    losses = [float(step(batch)[0]) for batch in batches(rows)]
    half = float(step.parts["half"]) * 2
    compiled = sum(program.jitted._cache_size() for program in step.programs)
    here = sum(array.addressable_shards[0].data.nbytes for array in step.weights.arrays.values())
    whole = sum(array.nbytes for array in step.weights.arrays.values())
    state = [value.tolist() for value in module.state_dict().values()]
    moments = [entry["exp_avg"].tolist() for entry in step.optimizer.state_dict()["state"].values()]
    found = {"losses": losses, "half": half, "state": state, "moments": moments, "here": here / whole}
    said = {}
    if options == FSDP and rows == ROWS:
        step(batches()[0])
        said = differing(module, step)
    return {**found, "programs": compiled, "said": said}


def continued() -> dict:
    """Save the whole state in the middle, and go on from it in new objects."""
    _, first = made(RANK, **FSDP)
    losses = [float(first(batch)[0]) for batch in batches()[: STEPS // 2]]
    state = first.state_dict()
    _, second = made(RANK + 7, **FSDP)
    second.load_state_dict(state)
    return {"losses": losses + [float(second(batch)[0]) for batch in batches()[STEPS // 2 :]]}


def saved_by_one() -> dict:
    """Read weights in process 0 alone, in the middle: with ddp each process has them."""
    module, step = made(RANK)
    losses = []
    for number, batch in enumerate(batches()):
        losses.append(float(step(batch)[0]))
        if number == 9 and RANK == 0:
            assert all(value.isfinite().all() for value in module.state_dict().values())
    return {"losses": losses}


def differing(module, step) -> dict[str, str]:
    """Return what is said where process 1 does something else than process 0."""
    group, said = step.optimizer.param_groups[0], {}
    for wrong in ("rows", "rate", "read"):
        batch, rate = batches()[0], group["lr"]
        try:
            if RANK == 1 and wrong == "rows":
                batch = {name: rows[:5] for name, rows in batch.items()}
            elif RANK == 1 and wrong == "rate":
                group["lr"] = 0.5
            elif RANK == 1:
                module.state_dict()
            step(batch)
        except UserError as error:
            said[wrong] = str(error)
        group["lr"] = rate
    return said


def branching() -> dict:
    """Return what is said of a loss that cannot be one program."""
    module = Net()

    def loss(module, batch):
        value = module(batch["ids"]).square().mean()
        return value * 2 if value > 0 else value

    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1), **FSDP)
    try:
        step(batches()[0])
    except UserError as error:
        return {"refused": str(error)}
    return {}


CASES = {
    **{name: (lambda options=options: trained(options)) for name, options in LOOPS.items()},
    "odd rows": lambda: trained(FSDP, rows=6),
    "continued": continued,
    "saved by one": saved_by_one,
    "branching": branching,
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"case": name, "found": CASES[name]()}), flush=True)
