"""Several torch optimizers over one loss step as torch steps them, in one program where all have a rule."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

import jaxtrain
from jaxtrain import UserError
from tests.e2e.loops import STEPS, assert_same, batches, mse, net


class Halved(SGD):
    """An optimizer of one's own, which no rule follows."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5).sub_(group["lr"] * parameter.grad)


def apart(module, second=SGD) -> list:
    """AdamW for what lies before the last layer, another optimizer for the layer."""
    return [AdamW(module[0].parameters(), 1e-2), second(module[-1].parameters(), 0.1)]


def shared(module) -> list:
    """Both move the last layer, one after the other."""
    return [AdamW(module.parameters(), 1e-2), SGD(module[-1].parameters(), 0.1, momentum=0.9)]


def stepped_rates(optimizers) -> list:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]


def train_in_torch(module, optimizers, schedulers=(), data=None, clip=None) -> None:
    for batch in data or batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        mse(module, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        for one in [*optimizers, *schedulers]:
            one.step()


def moments(optimizers) -> list[torch.Tensor]:
    entries = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in entries for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("made", [apart, shared])
def test_several_optimizers_are_one_program(made):
    theirs, ours = net(), net()
    their_optimizers, optimizers = made(theirs), made(ours)
    train_in_torch(theirs, their_optimizers, stepped_rates(their_optimizers), clip=0.3)
    step = jaxtrain.compile(ours, mse, optimizers, stepped_rates(optimizers), clip_norm=0.3)
    for batch in batches():
        step(batch)
    step.sync()
    assert step.torch is None
    assert_same(theirs, ours)
    assert len(moments(optimizers)) == len(moments(their_optimizers)) > 0
    for want, got in zip(moments(their_optimizers), moments(optimizers), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert [group["lr"] for group in step.optimizer.param_groups] == pytest.approx([1e-2 / 2**6, 0.1 / 2**6])


def test_torch_steps_all_where_one_has_no_rule():
    theirs, ours = net(), net()
    train_in_torch(theirs, apart(theirs, Halved))
    step = jaxtrain.compile(ours, mse, apart(ours, Halved))
    for batch in batches():
        step(batch)
    step.sync()
    assert step.torch is not None
    assert_same(theirs, ours)


def test_muon_and_adamw_train_as_in_torch():
    def made(module):
        matrices = [p for p in module.parameters() if p.ndim == 2]
        rest = [p for p in module.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, 1e-2), AdamW(rest, 1e-2)]

    theirs, ours = net(), net()
    train_in_torch(theirs, made(theirs))
    step = jaxtrain.compile(ours, mse, made(ours))
    for batch in batches():
        step(batch)
    step.sync()
    assert_same(theirs, ours, atol=1e-3)  # Muon's products are in bfloat16


def test_a_state_dict_goes_on_with_the_same_bits():
    def made():
        module = net()
        return module, jaxtrain.compile(module, mse, shared(module))

    whole, step = made()
    for batch in batches():
        step(batch)
    step.sync()
    _, first = made()
    for batch in batches()[: STEPS // 2]:
        first(batch)
    ours, second = made()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in batches()[STEPS // 2 :]:
        second(batch)
    second.sync()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), ours.parameters(), strict=True))


def test_a_state_loaded_into_one_of_them_counts():
    theirs, ours = net(), net()
    their_optimizers, optimizers = shared(theirs), shared(ours)
    step = jaxtrain.compile(ours, mse, optimizers)
    for data in (batches()[:4], batches()[4:]):
        train_in_torch(theirs, their_optimizers, data=data)
        for batch in data:
            step(batch)
        for optimizer in (their_optimizers[1], optimizers[1]):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    step.sync()
    assert_same(theirs, ours)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda module: [], "an empty list, wanted a torch.optim optimizer or several"),
        (lambda module: [0.1], "a list with float, wanted torch.optim optimizers"),
        (lambda module: apart(net()), "are not the module's"),
    ],
)
def test_a_list_of_something_else_is_refused(made, expected):
    module = net()
    with pytest.raises(UserError, match=expected):
        jaxtrain.compile(module, mse, made(module))


def test_a_scheduler_of_a_strange_optimizer_is_refused():
    module = net()
    strange = stepped_rates([SGD(net().parameters(), 0.1)])
    with pytest.raises(UserError, match="StepLR, wanted a torch lr_scheduler that was made for this very optimizer"):
        jaxtrain.compile(module, mse, apart(module), strange)
