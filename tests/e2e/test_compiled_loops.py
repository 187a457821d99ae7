"""Loops around a compiled step change Python's values, evaluate, stop, go on, and bring their own optimizer."""

import copy
import dataclasses
import math

import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import jaxtrain
from jaxtrain import UserError
from tests.e2e.loops import STEPS, assert_same, batches, check, mse, net, pair, sgd, torch_step


def test_a_change_of_a_module_around_the_loss_counts():
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
    teacher[0].weight.data.mul_(2)
    step.sync()
    expected = float(distil(ours, batches()[1]).detach())
    assert float(step(batches()[1])) == pytest.approx(expected, rel=1e-5)


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
    assert len(step.programs) == programs


def test_a_value_that_python_branches_on_too_often_is_refused_by_name():
    state = {"level": 0}
    loss = lambda module, batch: F.mse_loss(module(batch[0]), batch[1]) * float(str(state["level"]))
    step = jaxtrain.compile(Tempered(), loss, optax.sgd(0.1))
    for level in range(8):
        state["level"] = level
        step(batches()[0])
    state["level"] = 8
    with pytest.raises(UserError, match=r"another graph at most calls, .*\['level'\] == 7"):
        step(batches()[0])


def test_a_captured_parameter_leaves_the_loss_to_torch(caplog):
    torch.manual_seed(2)
    centre = nn.Linear(1, 1)
    check(*pair(), loss_fn=lambda m, batch: F.mse_loss(centre(m(batch[0])), batch[1]))
    assert "a parameter that the step's optimizer does not hold" in caplog.text


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


def test_evaluations_share_their_programs_until_a_layer_is_replaced():
    module, optimizer = pair(lambda: net(nn.Identity()), sgd)[0]
    step, batch = jaxtrain.compile(module, mse, optimizer), batches()[0]
    first = step.eval()
    assert step.eval() is first
    module[1] = nn.Tanh()
    step(batch)
    np.testing.assert_allclose(step.eval()(batch[0]), module(batch[0]).detach(), atol=1e-5)
    assert step.eval() is not first


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


def clip_in_place(module):
    with torch.no_grad():
        module[0].weight.clamp_(-0.1, 0.1)


def clip_by_data(module):
    """As WGAN's loops do; torch's version counters do not see it."""
    for p in module.parameters():
        p.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("clip", [clip_in_place, clip_by_data])
def test_weights_changed_in_torch_between_steps_are_taken(clip, sync):
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for batch in batches():
        plain(batch), step(batch)
        if sync:
            step.sync()
        clip(theirs), clip(ours)
    x = batches()[0][0]
    np.testing.assert_allclose(step.eval()(x), theirs(x).detach(), atol=1e-5)
    assert_same(theirs, ours)


def test_a_large_weight_changed_through_an_array_of_before_is_refused_within_its_turn():
    module = nn.Sequential(*(nn.Linear(200, 200) for _ in range(4)))  # 160 KB each
    array = module[3].weight.detach().numpy()
    step = jaxtrain.compile(module, lambda m, x: m(x).square().mean(), torch.optim.SGD(module.parameters(), 1e-2))
    step(torch.ones(8, 200))
    array[:] = 0
    five_calls = (step(torch.ones(8, 200)) for _ in range(5))
    with pytest.raises(UserError, match=r"3\.weight was changed in torch"):
        list(five_calls)


class Centred(nn.Module):
    """Assigns its buffers anew, as most running averages are written."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        before = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.calls = self.calls + 1
        return self.inner(x - self.mean) + (self.mean - before).sum()


def test_a_buffer_that_the_forward_assigns_anew_is_torchs():
    theirs, ours = pair(Centred)
    check(theirs, ours)
    assert int(ours[0].calls) == STEPS


class Growing(Centred):
    def forward(self, x):
        self.mean = torch.cat([self.mean, x.mean().reshape(1)])
        return self.inner(x)


def test_a_buffer_that_changes_its_shape_is_torchs():
    theirs, ours = pair(Growing)
    check(theirs, ours)
    assert ours[0].mean.shape == (6 + STEPS,)


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


def test_an_optimizer_from_elsewhere_is_compared_with_its_rule_before_it_is_believed(caplog):
    check(*pair(optimizer=lambda module: Lion(module.parameters(), 1e-2, weight_decay=0.1)))
    check(*pair(optimizer=lambda module: WrongLion(module.parameters(), 1e-2)))
    assert "Lion does not follow the rule" in caplog.text


REFUSED = {
    "another module's parameters": (lambda m: torch.optim.SGD(net().parameters(), 0.1), "not the module's"),
    "sparse adam": (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam has no counterpart"),
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


@dataclasses.dataclass
class Rows:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_may_be_a_dataclass(nested):
    """One program where it is the batch itself; torch's loss around the compiled module where it lies inside."""
    rows = (lambda batch: batch[0]) if nested else (lambda batch: batch)
    loss = lambda module, batch: F.mse_loss(module(rows(batch).x), rows(batch).y)
    data = [(Rows(*batch), 1) if nested else Rows(*batch) for batch in batches()]
    check(*pair(), loss_fn=loss, data=data)


def test_torchs_functions_take_the_loss_of_a_step():
    module = net()
    step = jaxtrain.compile(module, mse, sgd(module))
    losses = [step(batch) for batch in batches(3)]
    values = torch.tensor([loss.item() for loss in losses])
    assert torch.equal(torch.stack(losses), values)
    assert torch.isfinite(losses[0])
    assert losses[0].isfinite()
    assert torch.equal(losses[0] * torch.ones(2), values[0] * torch.ones(2))
    assert torch.equal(torch.ones(2) - losses[0], 1 - values[0] * torch.ones(2))
    assert losses[0] == values[0]
    assert losses[0] != 0
    assert (losses[0].exp(), losses[0].ndim, losses[0].tolist()) == (values[0].exp(), 0, values[0].item())


def test_a_step_without_gradients_is_refused_and_trains_nothing():
    (module, optimizer), _ = pair(optimizer=sgd)
    step = jaxtrain.compile(module, mse, optimizer)
    first = batches(1)[0]
    step(first)
    before = copy.deepcopy(module.state_dict())
    for off in (torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)):
        with off(), pytest.raises(UserError, match="under torch.no_grad"):
            step(first)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert step.count == 1
