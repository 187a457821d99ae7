"""Loops of a user's own around `jaxtrain.compile`: each is written twice, for torch and for the compiled step, and
gives the same losses and the same weights."""

import collections
import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import jaxtrain
from tests.e2e.loops import STEPS, assert_same, batches, check, mse, net, pair, sgd, torch_step

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, nesterov=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.01),
    "adamw_maximize": lambda p: torch.optim.AdamW(p, 1e-3, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True, momentum=0.5, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2, t0=20),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_torch_optimizer_gives_torchs_weights_and_state_after_100_steps(name):
    make = OPTIMIZERS[name]
    (theirs, their_optimizer), (ours, optimizer) = pair(optimizer=lambda module: make(module.parameters()))
    check((theirs, their_optimizer), (ours, optimizer), data=batches(100))
    want, got = their_optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    for number, entries in want.items():
        for key, value in entries.items():
            if value is not None:
                np.testing.assert_allclose(got[number][key], value, rtol=1e-4, atol=1e-5, err_msg=f"{number} {key}")


SCHEDULERS = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_torch_scheduler_is_obeyed_handed_over_or_stepped_by_the_loop(name):
    (theirs, their_optimizer), (ours, optimizer) = pair()
    by_hand, own_optimizer = pair()[1]
    schedulers = [SCHEDULERS[name](o) for o in (their_optimizer, optimizer, own_optimizer)]
    plain = torch_step(theirs, their_optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = jaxtrain.compile(ours, mse, optimizer, schedulers[1])
        second = jaxtrain.compile(by_hand, mse, own_optimizer)
        for batch in batches():
            plain(batch)
            schedulers[0].step()
            first(batch)
            second(batch)
            schedulers[2].step()
    first.sync()
    second.sync()
    assert_same(theirs, ours)
    assert_same(theirs, by_hand)
    assert optimizer.param_groups[0]["lr"] == their_optimizer.param_groups[0]["lr"]


def test_accumulation_averages_the_gradients_of_n_calls():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step = jaxtrain.compile(ours, mse, optimizer, accumulate=4)
    for number, batch in enumerate(batches()):
        (mse(theirs, batch) / 4).backward()
        step(batch)
        if number % 4 == 3:
            their_optimizer.step()
            their_optimizer.zero_grad()
    step.sync()
    assert_same(theirs, ours)


@pytest.mark.parametrize("in_torch", [False, True])
def test_a_gradient_of_an_earlier_call_waits_for_the_update(in_torch):
    seen = []

    def loss(module, batch):
        value = F.mse_loss(module[batch[2]](batch[0]), batch[1])
        if in_torch:
            seen.append(value.item())
        return value

    (theirs, their_optimizer), (ours, optimizer) = pair(lambda: nn.ModuleList([net(), nn.Linear(6, 1)]))
    ours.load_state_dict(theirs.state_dict())
    step = jaxtrain.compile(ours, loss, optimizer, accumulate=2)
    for number, batch in enumerate(batches()):
        batch = (*batch, number % 2)
        (loss(theirs, batch) / 2).backward()
        step(batch)
        if number % 2:
            their_optimizer.step()
            their_optimizer.zero_grad()
    step.sync()
    assert_same(theirs, ours)


def test_clipping_is_torchs():
    check(*pair(), clip=0.1)


def test_a_short_last_batch_and_batch_norm_run_in_their_true_shape():
    data = [*batches(4), *[(x[:3], y[:3]) for x, y in batches(1)], *batches(2)]
    check(*pair(lambda: net(nn.BatchNorm1d(8)), sgd), data=data)


def test_modes_and_frozen_parameters_are_those_of_the_module():
    def make():
        module = net(nn.BatchNorm1d(8)).train()
        module[1].eval()
        module[0].requires_grad_(False)
        return module

    (theirs, their_optimizer), (ours, optimizer) = pair(make)
    check((theirs, their_optimizer), (ours, optimizer))
    assert torch.equal(ours[0].weight, make()[0].weight)


def test_hooks_that_come_and_go_between_steps_count():
    ours, theirs = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    x, losses = torch.randn(5, 3), {}
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        loss_fn = lambda module, batch: module(batch).square().mean()
        compiled = module is ours
        step = jaxtrain.compile(module, loss_fn, optimizer) if compiled else torch_step(module, optimizer, loss_fn)
        hooks = [
            lambda: module[2].register_forward_hook(lambda inner, inputs, output: output * 2),
            lambda: module[2].weight.register_hook(lambda slope: slope * 3),
            lambda: module[2].register_full_backward_hook(lambda inner, into, out: (into[0] * 4,)),
            lambda: module[0].register_forward_pre_hook(lambda inner, inputs: (inputs[0] * 2,)),
        ]
        for hook in hooks:
            handle = hook()
            for _ in range(2):
                losses.setdefault(compiled, []).append(float(step(x)))
                handle.remove()
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-4)


def test_unfreezing_in_the_middle_trains_on():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    for module in (theirs, ours):
        module[0].requires_grad_(False)
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for number, batch in enumerate(batches()):
        if number == 5:
            for module in (theirs, ours):
                module[0].requires_grad_(True)
        plain(batch)
        step(batch)
    step.sync()
    assert_same(theirs, ours)


def test_groups_with_their_own_rates():
    def optimizer(module):
        head = {"params": module[2].parameters(), "lr": 1e-3, "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": module[0].parameters()}, head], 1e-2, weight_decay=0.1)

    check(*pair(optimizer=optimizer))


def test_a_parameter_without_gradient_is_not_decayed():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = net(), nn.Linear(6, 1)

        def forward(self, x):
            return self.used(x) + 0 * self.spare(x).detach()

    check(*pair(Spare, lambda module: torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.5)))


def test_tied_weights_stay_tied():
    def make():
        torch.manual_seed(2)
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
        module[2].weight = module[0].weight
        return module

    theirs, ours = pair(make)
    check(theirs, ours)
    assert ours[0][2].weight is ours[0][0].weight


def test_a_gradient_penalty():
    def loss(module, batch):
        x = batch[0].requires_grad_(True)
        out = module(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + 0.1 * slope.square().sum(1).mean()

    check(*pair(), loss_fn=loss)


@pytest.mark.parametrize("kind", [collections.defaultdict, collections.OrderedDict, collections.UserDict])
def test_batches_are_mappings_of_any_class(kind, caplog):
    def loss(module, batch):
        assert isinstance(batch, kind)
        return F.mse_loss(module(batch["x"]), batch["y"])

    data = [kind() for _ in range(3)]
    for made, (x, y) in zip(data, batches(3), strict=True):
        made.update(x=x, y=y)
    check(*pair(), loss_fn=loss, data=data)
    assert "in torch" not in caplog.text


def test_a_new_state_has_torchs_entries_in_torchs_order():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    mse(theirs, batches(1)[0]).backward()
    their_optimizer.step()
    step = jaxtrain.compile(ours, mse, optimizer)
    step(batches(1)[0])
    step.sync()
    assert list(optimizer.state_dict()["state"][0]) == list(their_optimizer.state_dict()["state"][0])


def test_named_batches_and_values_to_log():
    def loss(module, batch):
        out = module(batch["x"])
        error = F.mse_loss(out, batch["y"])
        return error + 0.1 * out.abs().mean(), {"error": error, "size": out.abs().mean()}

    _, (ours, optimizer) = pair()
    want = loss(ours, dict(zip("xy", batches()[0], strict=True)))
    total, parts = jaxtrain.compile(ours, loss, optimizer)(dict(zip("xy", batches()[0], strict=True)))
    assert total.item() == pytest.approx(want[0].item(), rel=1e-5)
    assert float(parts["error"]) == pytest.approx(want[1]["error"].item(), rel=1e-5)
    assert f"{parts['size']:.3f}" == f"{want[1]['size'].item():.3f}"


def test_a_gan_alternates_as_its_loop_does():
    def make():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6)), net()

    def d_loss(g, d, batch):
        real, noise = batch
        fake = g(noise).detach()
        return F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()

    def g_loss(g, d, batch):
        return F.softplus(-d(g(batch[1]))).mean()

    adam = lambda module: torch.optim.Adam(module.parameters(), 1e-2, betas=(0.5, 0.9))
    (tg, td), (g, d) = make(), make()
    optimizers = {module: adam(module) for module in (tg, td)}
    steps = jaxtrain.compile_many({"g": g, "d": d}, {"d": (d_loss, adam(d)), "g": (g_loss, adam(g))})
    for number, (real, _) in enumerate(batches()):
        batch = (real, torch.randn(8, 2, generator=torch.Generator().manual_seed(number)))
        for module, loss in ((td, d_loss), (tg, g_loss)):
            if module is td or number % 2:  # two critic updates to one of the generator
                optimizers[module].zero_grad()
                loss(tg, td, batch).backward()
                optimizers[module].step()
        steps["d"](batch)
        if number % 2:
            steps["g"](batch)
    steps.sync()
    assert_same(tg, g)
    assert_same(td, d)


def test_a_frozen_teacher_guides_a_student():
    teacher = net().eval().requires_grad_(False)

    def loss(student, teacher, batch):
        return F.mse_loss(student(batch[0]), teacher(batch[0]))

    make = lambda: nn.Linear(6, 1)
    torch.manual_seed(5)
    theirs = make()
    ours = copy.deepcopy(theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    steps = jaxtrain.compile_many(
        {"student": ours, "teacher": copy.deepcopy(teacher)},
        {"student": (loss, torch.optim.SGD(ours.parameters(), 0.1))},
    )
    for batch in batches():
        optimizer.zero_grad()
        loss(theirs, teacher, batch).backward()
        optimizer.step()
        steps(batch)
    steps.sync()
    assert_same(theirs, ours)


@pytest.mark.parametrize("nothing", [(), None, {}])
def test_a_loss_may_need_no_batch(nothing):
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    step = jaxtrain.compile(
        module, lambda module, batch: module.weight.square().sum(), torch.optim.SGD(module.parameters(), 0.1)
    )
    step(nothing)
    step.sync()
    assert step.torch is None  # one program
    torch.testing.assert_close(module.weight.detach(), 0.8 * before)
