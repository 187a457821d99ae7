"""Optimizers that follow no rule known here: gradients come from compiled modules, torch steps them."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import jaxtrain
from jaxtrain import UserError
from tests.e2e.loops import assert_same, batches, check, mse, net, pair


class LARS(torch.optim.Optimizer):
    """A rate per layer, as packages write it."""

    def __init__(self, params, lr=0.5, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad
                if p.ndim > 1:
                    grad = grad * (group["trust"] * p.norm() / grad.norm())
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                p.add_(buffer.mul_(group["momentum"]).add_(grad), alpha=-group["lr"])


class Noam(torch.optim.Adam):
    """A warm-up inside step()."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.02 * min(self.count**-0.5, self.count * 4**-1.5)
        return super().step(closure)


class Centralized(torch.optim.SGD):
    """Changes the gradients before the step."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
        return super().step(closure)


class Wrapper:
    """No torch.optim.Optimizer: a schedule around one."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.count += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        self.optimizer.step()


MAKE = {
    "lars": lambda m: LARS(m.parameters()),
    "noam": lambda m: Noam(m.parameters(), lr=0.0),
    "centralized": lambda m: Centralized(m.parameters(), lr=0.1, momentum=0.9),
    "wrapper": lambda m: Wrapper(torch.optim.SGD(m.parameters(), lr=0.1)),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", MAKE)
def test_an_optimizer_without_a_rule_trains_as_in_torch(name, caplog):
    check(*pair(optimizer=MAKE[name]))
    assert "forward and backward of the modules run compiled, the loss and updates in torch" in caplog.text


def test_clipping_accumulation_and_a_schedule_go_with_it():
    (theirs, their_optimizer), (ours, optimizer) = pair(optimizer=MAKE["lars"])
    schedules = [lr_scheduler.ExponentialLR(one, 0.9) for one in (their_optimizer, optimizer)]
    step = jaxtrain.compile(ours, mse, optimizer, schedules[1], accumulate=2, clip_norm=0.5)
    for number, batch in enumerate(batches(), 1):
        (mse(theirs, batch) / 2).backward()
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            their_optimizer.step()
            their_optimizer.zero_grad()
            schedules[0].step()
        step(batch)
    assert_same(theirs, ours)
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()


def test_a_loop_goes_on_from_the_steps_state():
    whole, parts = net(), net()
    reference = jaxtrain.compile(whole, mse, LARS(whole.parameters()))
    first = jaxtrain.compile(parts, mse, LARS(parts.parameters()))
    for batch in batches()[:3]:
        reference(batch)
        first(batch)
    state = copy.deepcopy(first.state_dict())
    other = net()
    second = jaxtrain.compile(other, mse, LARS(other.parameters()))
    second.load_state_dict(state)
    for batch in batches()[3:6]:
        assert float(reference(batch)) == float(second(batch))
    assert_same(whole, other)


@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe", "history_size": 5}], ids=["plain", "wolfe"])
def test_lbfgs_evaluates_the_compiled_modules_as_often_as_it_likes(options, caplog):
    """Two steps of four evaluations; later a line search may branch on a last bit."""
    make = lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4, **options)
    (theirs, their_optimizer), (ours, optimizer) = pair(optimizer=make)
    step = jaxtrain.compile(ours, mse, optimizer)
    for batch in batches(1, rows=32) * 2:

        def evaluate(batch=batch):
            their_optimizer.zero_grad()
            loss = mse(theirs, batch)
            loss.backward()
            return loss

        assert float(step(batch)) == pytest.approx(their_optimizer.step(evaluate).item(), rel=1e-4)
    assert_same(theirs, ours, 1e-4)
    assert "LBFGS has no counterpart: it evaluates the loss several times" in caplog.text


def test_lbfgs_takes_no_parts_of_batches():
    module = net()
    step = jaxtrain.compile(module, mse, torch.optim.LBFGS(module.parameters()), accumulate=2)
    with pytest.raises(UserError, match="LBFGS evaluates one loss several times per step"):
        step(batches(1)[0])
