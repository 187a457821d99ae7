"""Train random losses written with torch's operators, here and in torch: `python -m tests.chaos.random_losses`.

A draw is a loss, a module, a number of samples, a batch size and accumulation steps. One epoch of SGD here must end in
torch's weights, or be refused where torch fails too or where the loss is a sum over micro-batches.
"""

import argparse
import dataclasses
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import Trainer, TrainingConfig
from jaxtrain.errors import UserError

LIMIT = 1e-4  # relative, on all weights together
RATE = 0.05

POINTWISE: dict[str, Callable] = {  # (output, float target, class) -> one value per element or per row
    "(o-t)**2": lambda o, t, y: (o - t) ** 2,
    "|o-t|": lambda o, t, y: (o - t).abs(),
    "softplus(o)": lambda o, t, y: F.softplus(o),
    "o*t": lambda o, t, y: o * t,
    "ce": lambda o, t, y: F.cross_entropy(o, y, reduction="none"),
    "smooth_l1": lambda o, t, y: F.smooth_l1_loss(o, t, reduction="none"),
    "bce": lambda o, t, y: F.binary_cross_entropy_with_logits(o, t.sigmoid(), reduction="none"),
    "o-o.mean(0)": lambda o, t, y: (o - o.mean(0)) ** 2,
    "gather": lambda o, t, y: -F.log_softmax(o, -1).gather(1, y[:, None])[:, 0],
    "pairs": lambda o, t, y: F.normalize(o + 2, dim=1) @ F.normalize(t + 2, dim=1).T,
}
REDUCTIONS: dict[str, Callable] = {  # values -> scalar, or one value per row
    "mean": lambda p: p.mean(),
    "sum/len": lambda p: p.sum() / len(p),
    "sum/numel": lambda p: p.sum() / p.numel(),
    "sum": lambda p: p.sum(),
    "none": lambda p: p,
    "max": lambda p: p.max(),
    "std(0)": lambda p: p.std(0).mean(),
    "var": lambda p: p.var(unbiased=False),
    "norm": lambda p: p.norm(),
    "rms": lambda p: (p**2).mean().sqrt(),
    "median": lambda p: p.median(),
    "nanmean": lambda p: p.nanmean(),
    "cdist.max": lambda p: torch.cdist(p.reshape(len(p), -1), p.reshape(len(p), -1) + 1).max(),
    "cdist.mean": lambda p: torch.cdist(p.reshape(len(p), -1), p.reshape(len(p), -1) + 1).mean(),
    "einsum": lambda p: torch.einsum("b...,b...->", p, p) / len(p),
    "dot": lambda p: torch.dot(p.flatten(), p.flatten()),
    "first row": lambda p: p[0].mean(),
    "second row": lambda p: p[1].mean(),
    "last row": lambda p: p[-1].mean(),
    "every other": lambda p: p[::2].mean(),
    "logsumexp": lambda p: p.logsumexp(0).mean(),
    "topk": lambda p: p.flatten().topk(2).values.mean(),
    "sorted half": lambda p: p.flatten().sort().values[: p.numel() // 2].mean(),
    "cumsum": lambda p: p.cumsum(0)[-1].mean(),
    "differences": lambda p: (p[1:] - p[:-1]).abs().mean(),
    "stack": lambda p: torch.stack([row.mean() for row in p.reshape(len(p), -1).unbind(1)]).mean(),
}


class Net(nn.Module):
    """x: float [batch, 4] -> [batch, 3]; centred: what a row gives depends on the others of its batch."""

    def __init__(self, centred: bool):
        super().__init__()
        self.fc1, self.fc2, self.centred = nn.Linear(4, 6), nn.Linear(6, 3), centred

    def forward(self, x):
        h = torch.tanh(self.fc1(x))
        return self.fc2(h - h.mean(0) if self.centred else h)


@dataclasses.dataclass(frozen=True)
class Draw:
    terms: tuple[tuple[str, str, float], ...]  # (pointwise, reduction, coefficient)
    samples: int
    batch: int
    accumulate: int
    centred: bool

    @classmethod
    def of(cls, seed: int) -> "Draw":
        rng = random.Random(seed)
        terms = tuple(
            (rng.choice(list(POINTWISE)), rng.choice(list(REDUCTIONS)), rng.choice([1.0, 0.3]))
            for _ in range(rng.choice([1, 1, 2]))
        )
        accumulate = rng.choice([1, 1, 2, 3])
        return cls(terms, rng.randint(3, 17), accumulate * rng.randint(2, 5), accumulate, rng.random() < 0.25)

    def loss(self, output, batch):
        values = [
            factor * REDUCTIONS[reduce](POINTWISE[point](output, batch[1], batch[2]))
            for point, reduce, factor in self.terms
        ]
        return values[0] if len(values) == 1 else sum(value.mean() for value in values)


def in_torch(draw: Draw, module: nn.Module, data: torch.utils.data.TensorDataset) -> bool:
    """Train an epoch of SGD, a step's gradient the mean over its micro-batches; True where every loss and gradient norm
    is finite."""
    finite = True
    micro = draw.batch // draw.accumulate
    for start in range(0, draw.samples, draw.batch):
        rows = data[start : start + draw.batch]
        parts = [tuple(column[i : i + micro] for column in rows) for i in range(0, len(rows[0]), micro)]
        value = sum(draw.loss(module(part[0]), part).mean() for part in parts) / len(parts)
        value.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in module.parameters()]).norm()
        finite &= bool(value.isfinite() and norm.isfinite())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
    return finite


def is_sum(draw: Draw, module: nn.Module, data: torch.utils.data.TensorDataset) -> bool:
    """Twice the rows, twice the loss."""
    with torch.no_grad():
        once, twice = (data[[0, 1] * n] for n in (1, 2))
        values = [draw.loss(module(rows[0]), rows).mean() for rows in (once, twice)]
    return torch.isclose(values[1], 2 * values[0], rtol=1e-4).item()


def difference(seed: int) -> tuple[float, str]:
    """Relative difference of the weights that the draw trains here and in torch, and a word about it: "equal",
    "refused" (rightly), "not finite" on both sides, or what is wrong."""
    draw = Draw.of(seed)
    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(
        torch.randn(draw.samples, 4), torch.randn(draw.samples, 3), torch.randint(0, 3, (draw.samples,))
    )
    module = Net(draw.centred)
    theirs = Net(draw.centred)
    theirs.load_state_dict(module.state_dict())
    before = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
    failed = ""
    try:
        finite = in_torch(draw, theirs, data)
    except (IndexError, RuntimeError, ValueError) as error:
        failed = str(error)
    wanted = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    refusable = draw.accumulate > 1 and is_sum(draw, module, data)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            run={"dir": str(pathlib.Path(folder) / "run"), "quiet": True},
            data={"batch_size": draw.batch, "shuffle": False},
            train={"epochs": 1, "accumulate_steps": draw.accumulate},
            optim={"name": "sgd", "lr": RATE, "weight_decay": 0, "clip_norm": None, "schedule": {"name": "constant"}},
            evaluation={"every_epochs": None},
            tracking={"tensorboard": False},
            shard={"devices": 1},
        )
        try:
            Trainer(module, data, None, config, loss=draw.loss).train()
        except UserError as error:
            if failed or refusable:
                return 0.0, "refused"
            if not finite or not wanted.isfinite().all():
                return 0.0, "not finite"
            return float("inf"), f"refused, and torch trains: {error}"
    if failed:
        return float("inf"), f"trained, and torch fails: {failed}"
    got = torch.cat([p.detach().flatten() for p in module.parameters()])
    apart, moved = (got - wanted).norm(), (wanted - before).norm()
    rounding = torch.finfo(torch.float32).eps * wanted.norm()  # a loss without a slope moves weights by less
    off = 0.0 if apart <= rounding else float(apart / moved.clamp(min=1e-6))
    return off, "equal" if off <= LIMIT else "differs"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args(argv)
    counts: dict[str, int] = {}
    wrong = 0
    for seed in range(arguments.first, arguments.first + arguments.draws):
        off, word = difference(seed)
        kind = word.partition(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        if off > LIMIT:
            wrong += 1
            print(f"{seed}: {off:.1e} {word} {Draw.of(seed)}", flush=True)
        if sum(counts.values()) % 50 == 0:
            print(f"up to {seed}: {dict(sorted(counts.items()))}", file=sys.stderr, flush=True)
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
