"""Loops with DistributedDataParallel as users write them, in one of several processes: each runs in torch and around a
compiled step, and a line of JSON gives the largest differences. `python -m tests.e2e.ddp_loops` under a launcher."""

import contextlib
import datetime
import json
import sys

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import jaxtrain


def rank() -> int:
    return distributed.get_rank()


def net(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(1 + rank())  # the wrapper sends process 0's weights to all
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def normed(**options) -> nn.Module:
    return DistributedDataParallel(net(nn.BatchNorm1d(8)), **options)


def batches(steps: int = 10, rows: int = 8) -> list:
    draw = torch.Generator().manual_seed(100 + rank())
    return [(torch.randn(rows, 6, generator=draw), torch.randn(rows, 1, generator=draw)) for _ in range(steps)]


def mse(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], 0.05, momentum=0.9)


class Plain:
    """torch's own loop body under the names of a compiled step."""

    torch = None

    def __init__(self, modules, loss_fn, optimizer, scheduler=None, accumulate=1, clip_norm=None):
        self.modules, self.loss_fn, self.optimizer, self.scheduler = modules, loss_fn, optimizer, scheduler
        self.accumulate, self.clip_norm, self.count = accumulate, clip_norm, 0

    def __call__(self, batch, update=None):
        loss = self.loss_fn(*self.modules, batch)
        (loss / (self.accumulate if update is None else 1)).backward()
        self.count += 1
        if self.count % self.accumulate == 0 if update is None else update:
            if self.clip_norm is not None:
                held = [p for group in self.optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(held, self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()  # of parameters beside the modules
            for module in self.modules:
                module.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        return loss.detach()

    def sync(self):
        pass


def compiled(modules, loss_fn, optimizer, scheduler=None, **options):
    named = {f"module{number}": module for number, module in enumerate(modules)}
    return jaxtrain.compile_many(named, {"loss": (loss_fn, optimizer, scheduler)}, **options)["loss"]


def run(step, data=None, pause=None):
    """The losses of a loop; pause: gives the context of a call of this number."""
    contexts = pause or (lambda number: contextlib.nullcontext())
    losses = []
    for number, batch in enumerate(data or batches()):
        with contexts(number):
            losses.append(float(step(batch)))
    step.sync()
    return losses


def of_one_module(module, make, loss_fn=mse, optimizer=sgd, data=None, pause=None, **options):
    step = make([module], loss_fn, optimizer(module), **options)
    return [module], run(step, data, pause), step


def plain(make):
    adamw = lambda module: torch.optim.AdamW(module.parameters(), 1e-2)
    return of_one_module(DistributedDataParallel(net()), make, optimizer=adamw)


def clip_and_scheduler(make):
    module = DistributedDataParallel(net())
    optimizer = sgd(module)
    step = make([module], mse, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 10), clip_norm=0.3)
    return [module], run(step), step


def batch_norm(make):
    return of_one_module(normed(), make)


def batch_norm_of_each_process(make):
    return of_one_module(normed(forward_sync_buffers=False), make)


def accumulation(make):
    return of_one_module(normed(), make, accumulate=5)


def accumulation_with_no_sync(make):
    module = normed()
    pause = lambda number: contextlib.nullcontext() if number % 5 == 4 else module.no_sync()
    return of_one_module(module, make, pause=pause, accumulate=5)


def updates_inside_no_sync(make):
    module = DistributedDataParallel(net())
    step = make([module], mse, sgd(module))
    losses = []
    for number, batch in enumerate(batches()):
        with module.no_sync() if number % 2 else contextlib.nullcontext():
            losses.append(float(step(batch, update=bool(number % 2))))
    step.sync()
    return [module], losses, step


def uneven_batches(make):
    data = [tuple(x[: 8 - 3 * rank() * (number > 5)] for x in batch) for number, batch in enumerate(batches())]
    return of_one_module(normed(), make, data=data)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x, which):
        return (self.second if which else self.first)(x)


def unused_parameters(make):
    torch.manual_seed(2)
    module = DistributedDataParallel(Branches(), find_unused_parameters=True)
    loss = lambda module, batch: F.mse_loss(module(batch[0], batch[2]), batch[1])
    adamw = lambda module: torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.3)
    pause = lambda number: contextlib.nullcontext() if number % 2 else module.no_sync()
    data = [(*batch, (number + rank() * (number > 4)) % 3 % 2) for number, batch in enumerate(batches(12))]
    return of_one_module(module, make, loss, adamw, data, pause, accumulate=2)


def a_loss_that_torch_runs_in_one_process(make):
    seen = []

    def loss(module, batch):
        value = mse(module, batch)
        if rank() == 1:
            seen.append(value.item())
        return value

    module = normed()
    pause = lambda number: contextlib.nullcontext() if number % 2 else module.no_sync()
    return of_one_module(module, make, loss, pause=pause, accumulate=2)


def a_loss_around_the_wrapper(make):
    module = normed()
    penalty = lambda inner: 1e-2 * inner.module[0].weight.square().sum()
    return of_one_module(module, make, lambda _, batch: F.mse_loss(module(batch[0]), batch[1]) + penalty(module))


def the_module_inside_stays_local(make):
    module = DistributedDataParallel(net())
    return of_one_module(module, make, lambda module, batch: F.mse_loss(module.module(batch[0]), batch[1]))


def a_plain_module_stays_local(make):
    return of_one_module(net(), make)


def a_plain_head_beside_the_wrapper(make):
    torch.manual_seed(4)
    module, head = DistributedDataParallel(net()), nn.Linear(1, 1)
    loss = lambda module, head, batch: F.mse_loss(head(module(batch[0])), batch[1])
    step = make([module, head], loss, sgd(module, head))
    return [module, head], run(step), step


def a_parameter_around_the_loss(make):
    """torch averages the gradients of the wrapper alone: the parameter becomes another one in each process."""
    module, held = DistributedDataParallel(net()), nn.ParameterList([nn.Parameter(torch.zeros(1))])
    log_sigma = held[0]
    loss = lambda module, batch: (torch.exp(-log_sigma) * mse(module, batch) + log_sigma).sum()
    step = make([module], loss, torch.optim.SGD([*module.parameters(), log_sigma], 0.05))
    return [module, held], run(step), step


def gradient_penalty(make):
    def loss(module, batch):
        x = batch[0].clone().requires_grad_(True)
        out = module(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + 0.1 * slope.square().sum(1).mean()

    return of_one_module(DistributedDataParallel(net()), make, loss)


def evaluation_in_between(make):
    module = normed()
    step = make([module], mse, sgd(module))
    losses = []
    for number, batch in enumerate(batches()):
        losses.append(float(step(batch)))
        if number % 4 == 3:
            step.sync()
            module.eval()
            with torch.no_grad():
                losses.append(float(mse(module, batch)))
            module.train()
    step.sync()
    return [module], losses, step


def gan(make, *extra, frozen=False):
    torch.manual_seed(5)
    g = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), *extra, nn.ReLU(), nn.Linear(8, 6)))
    d = DistributedDataParallel(net(*(type(layer)(8) for layer in extra)))

    def d_loss(g, d, batch):
        with torch.no_grad() if frozen else contextlib.nullcontext():
            fake = g(batch[1]).detach()
        return F.softplus(-d(batch[0])).mean() + F.softplus(d(fake)).mean()

    def g_loss(g, d, batch):
        return F.softplus(-d(g(batch[1]))).mean()

    parts = {"d": (d_loss, sgd(d)), "g": (g_loss, sgd(g))}
    if make is Plain:
        steps = {name: Plain([g, d], *part) for name, part in parts.items()}
    else:
        steps = jaxtrain.compile_many({"g": g, "d": d}, parts)
    draw = torch.Generator().manual_seed(rank())
    losses = []
    for real, _ in batches():
        batch = (real, torch.randn(8, 2, generator=draw))
        losses += [float(steps["d"](batch)), float(steps["g"](batch))]
    for name in parts:
        steps[name].sync()
    return [g, d], losses, steps["g"]


def two_wrappers_of_a_gan(make):
    return gan(make)


def a_gan_with_batch_norm(make):
    return gan(make, nn.BatchNorm1d(8), frozen=True)


LOOPS = {
    loop.__name__: loop
    for loop in (
        plain, clip_and_scheduler, batch_norm, batch_norm_of_each_process, accumulation, accumulation_with_no_sync,
        updates_inside_no_sync, uneven_batches, unused_parameters, a_loss_that_torch_runs_in_one_process,
        a_loss_around_the_wrapper, the_module_inside_stays_local, a_plain_module_stays_local,
        a_plain_head_beside_the_wrapper, a_parameter_around_the_loss, gradient_penalty, evaluation_in_between,
        two_wrappers_of_a_gan, a_gan_with_batch_norm,
    )
}  # fmt: skip


def compare(loop) -> dict[str, float]:
    """Largest differences between torch's losses and state and those around a compiled step."""
    (theirs, want, _), (ours, got, step) = loop(Plain), loop(compiled)
    values = lambda modules: [value.double() for module in modules for value in module.state_dict().values()]
    pairs = zip(values(theirs), values(ours), strict=True)
    return {
        "loss": max(abs(a - b) for a, b in zip(want, got, strict=True)),
        "state": max(float((a - b).abs().max()) for a, b in pairs),
        "torch": step.torch is not None,
    }


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    try:
        for name in names or LOOPS:
            found = compare(LOOPS[name])
            print(json.dumps({"loop": name, "found": found}), flush=True)
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
