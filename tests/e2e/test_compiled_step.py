"""Loops of a user's own around `jaxtrain.compile`: each is written twice, for torch and for the compiled step, and
gives the same losses and the same weights."""

import copy
import math
import warnings

import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import jaxtrain
from jaxtrain import UserError

STEPS = 12


def net(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def batches(steps: int = STEPS, rows: int = 8) -> list:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 6, generator=draw), torch.randn(rows, 1, generator=draw)) for _ in range(steps)]


def mse(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def torch_step(module, optimizer, loss_fn=mse, clip=None):
    def step(batch):
        optimizer.zero_grad()
        loss = loss_fn(module, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step


def pair(make=net, optimizer=lambda module: torch.optim.AdamW(module.parameters(), 1e-2)):
    theirs, ours = make(), make()
    return (theirs, optimizer(theirs)), (ours, optimizer(ours))


def sgd(module):
    """For a bias before a BatchNorm: its gradient is rounding, which Adam would magnify."""
    return torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)


def assert_same(theirs: nn.Module, ours: nn.Module, atol: float = 1e-5) -> None:
    for (name, want), got in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=atol, rtol=1e-4, err_msg=name)


def check(theirs, ours, loss_fn=mse, data=None, clip=None, **options) -> list[float]:
    (their_module, their_optimizer), (module, optimizer) = theirs, ours
    step = jaxtrain.compile(module, loss_fn, optimizer, clip_norm=clip, **options)
    plain = torch_step(their_module, their_optimizer, loss_fn, clip)
    losses = []
    for batch in data or batches():
        want, got = plain(batch), float(step(batch))
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
        losses.append(got)
    step.sync()
    assert_same(their_module, module)
    return losses


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


def test_a_captured_module_is_a_constant_until_it_changes():
    teacher = net().eval().requires_grad_(False)

    def distil(module, batch):
        return F.mse_loss(module(batch[0]), teacher(batch[0]))

    torch.manual_seed(5)
    theirs = nn.Linear(6, 1)
    ours = copy.deepcopy(theirs)
    pairs = [(module, torch.optim.SGD(module.parameters(), 0.1)) for module in (theirs, ours)]
    check(*pairs, loss_fn=distil)
    step = jaxtrain.compile(ours, distil, torch.optim.SGD(ours.parameters(), 0.1))
    step(batches()[0])
    with torch.no_grad():
        teacher[0].weight.mul_(2)
    with pytest.raises(UserError, match="has changed since it was recorded"):
        step(batches()[1])


class Tempered(nn.Module):
    shift = 0.0

    def __init__(self):
        super().__init__()
        self.net, self.temperature, self.squash = nn.Linear(6, 1), 1.0, False

    def forward(self, x):
        y = self.net(x) / self.temperature + self.shift
        return torch.tanh(y) if self.squash else y


CHANGES = {
    "attribute": lambda module, i: setattr(module, "temperature", 1 + i / 5),
    "class": lambda module, i: setattr(module, "shift", i / 5),
    "flag": lambda module, i: setattr(module, "squash", i % 3 == 0),
}


@pytest.mark.parametrize(
    ("name", "programs"), [("attribute", 2), ("class", 2), ("flag", 2), ("closure", 2), ("setting", 2), ("branch", 2)]
)
def test_a_python_value_that_changes_between_calls_is_torchs(name, programs):
    weight, settings = 0.0, {"decay": 0.0, "epoch": 0}

    def loss(module, batch):
        output = module(batch[0])
        value = F.mse_loss(output, batch[1]) + (weight + settings["decay"]) * output.pow(2).mean()
        return value * 2 if settings["epoch"] >= 4 else value

    (theirs, their_optimizer), (ours, optimizer) = pair(lambda: (torch.manual_seed(1), Tempered())[1], sgd)
    step, plain = jaxtrain.compile(ours, loss, optimizer), torch_step(theirs, their_optimizer, loss)
    for i, batch in enumerate(batches()[:1] * 8):
        if name in CHANGES:
            for module in (theirs, ours):
                CHANGES[name](module, i)
        elif name == "closure":
            weight = i / 5
        else:
            settings["decay" if name == "setting" else "epoch"] = i
        step(batch)
        plain(batch)
    step.sync()
    assert_same(theirs, ours)
    assert len({id(program) for program in step._programs.values()}) == programs


def test_a_value_that_python_branches_on_too_often_is_refused_by_name():
    state = {"level": 0}
    loss = lambda module, batch: F.mse_loss(module(batch[0]), batch[1]) * len(range(state["level"] + 1))
    step = jaxtrain.compile(Tempered(), loss, optax.sgd(0.1))
    for level in range(8):
        state["level"] = level
        step(batches()[0])
    state["level"] = 8
    with pytest.raises(UserError, match=r"Python branches on state\['level'\], whose values have asked for 8 programs"):
        step(batches()[0])


def test_a_captured_parameter_that_would_train_in_torch_is_refused():
    centre = nn.Linear(1, 1)
    module = net()
    loss = lambda m, batch: F.mse_loss(centre(m(batch[0])), batch[1])
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(UserError, match="a parameter of another module is used"):
        step(batches()[0])


def test_evaluation_in_between_sees_the_newest_weights():
    (theirs, their_optimizer), (ours, optimizer) = pair(lambda: net(nn.BatchNorm1d(8)), sgd)
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    forward = step.eval()
    for number, batch in enumerate(batches()):
        plain(batch)
        step(batch)
        if number % 5 == 0:
            theirs.eval()
            np.testing.assert_allclose(forward(batch[0]), theirs(batch[0]).detach(), atol=1e-5)
            theirs.train()
    assert step.count == STEPS


def test_a_loop_may_read_log_and_break():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    losses = [torch_step(theirs, their_optimizer)(batch) for batch in batches()]
    step, total = jaxtrain.compile(ours, mse, optimizer), 0.0
    for batch in batches():
        loss = step(batch)
        total += loss.detach()
        if step.count == 7 or not math.isfinite(loss.item()):
            break
    assert total.item() / 7 == pytest.approx(np.mean(losses[:7]), rel=1e-5)


def test_torch_and_jax_take_turns_with_one_optimizer():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    plain, own = torch_step(theirs, their_optimizer), torch_step(ours, optimizer)
    data = batches()
    for batch in data[:4]:
        own(batch)
    step = jaxtrain.compile(ours, mse, optimizer)  # takes Adam's moments over
    for batch in data[4:8]:
        step(batch)
    step.sync()
    for batch in data[8:]:
        own(batch)
    for batch in data:
        plain(batch)
    assert_same(theirs, ours)


def test_a_loop_goes_on_from_its_state_dict_bit_for_bit(tmp_path):
    def start():
        module = net(nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        return jaxtrain.compile(module, mse, optimizer, lr_scheduler.StepLR(optimizer, 3), seed=3), module

    data = batches()
    whole, module = start()
    losses = [float(whole(batch)) for batch in data]
    whole.sync()
    first, _ = start()
    for batch in data[:6]:
        first(batch)
    torch.save(first.state_dict(), tmp_path / "loop.pt")
    second, resumed = start()
    second.load_state_dict(torch.load(tmp_path / "loop.pt", weights_only=False))
    assert [float(second(batch)) for batch in data[6:]] == losses[6:]
    second.sync()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    "make", [lambda: optax.adamw(1e-2), lambda: optax.chain(optax.clip(0.1), optax.sgd(0.1)), lambda: optax.lamb(1e-2)]
)
def test_an_optax_optimizer_trains_the_module(make):
    ours = net()
    step = jaxtrain.compile(ours, mse, make())
    data = batches(1) * 30
    losses = [float(step(batch)) for batch in data]
    assert losses[-1] < 0.8 * losses[0]


def test_weights_changed_in_torch_after_a_sync_are_taken_and_before_it_refused():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    data = batches()
    for batch in data[:3]:
        plain(batch), step(batch)
    with torch.no_grad():
        ours[0].weight.clamp_(-0.1, 0.1)
    with pytest.raises(UserError, match=r"step\.sync\(\)"):
        step(data[3])
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for batch in data:
        plain(batch), step(batch)
        step.sync()
        with torch.no_grad():
            theirs[0].weight.clamp_(-0.1, 0.1)
            ours[0].weight.clamp_(-0.1, 0.1)
    assert_same(theirs, ours)


class Twisted(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)


class Lion(torch.optim.Optimizer):
    """The rule as packages write it."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p))
                b1, b2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((mean * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
                mean.mul_(b2).add_(p.grad, alpha=1 - b2)


class WrongLion(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)


WrongLion.__name__ = "Lion"


def test_an_optimizer_from_elsewhere_is_compared_with_its_rule_before_it_is_believed():
    check(*pair(optimizer=lambda module: Lion(module.parameters(), 1e-2, weight_decay=0.1)))
    module = net()
    with pytest.raises(UserError, match="does not follow the rule"):
        jaxtrain.compile(module, mse, WrongLion(module.parameters(), 1e-2))


REFUSED = {
    "another module's parameters": (lambda m: torch.optim.SGD(net().parameters(), 0.1), "not the module's"),
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS has no counterpart"),
    "an overridden step": (lambda m: Twisted(m.parameters(), 0.1), "overrides step"),
    "no optimizer": (lambda m: 0.1, "wanted a torch.optim optimizer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_converted_is_refused_before_the_first_step(what):
    module = net()
    make, words = REFUSED[what]
    with pytest.raises(UserError, match=words):
        jaxtrain.compile(module, mse, make(module))


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape():
    module = net()
    step = jaxtrain.compile(module, lambda m, b: (m(b[0]) - b[1]) ** 2, torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(UserError, match=r"shape \(8, 1\), wanted a scalar"):
        step(batches(1)[0])


def test_bf16_stays_near_torchs_autocast():
    theirs, ours = pair()

    def autocast(module, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(module(batch[0]).float(), batch[1])

    plain = torch_step(*theirs, loss_fn=autocast)
    step = jaxtrain.compile(ours[0], mse, ours[1], precision="bf16")
    for batch in batches():
        assert float(step(batch)) == pytest.approx(plain(batch), rel=3e-2)
