"""Trained tensors that no module has, which the loss reads from around it, train in the same program."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain.errors import UserError
from torch_bridge.loose_parameters import LooseParameters


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 3), torch.randint(0, 4, (8,))) for _ in range(6)]


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 4))

    def forward(self, features, target):
        return F.cross_entropy(4 * F.linear(F.normalize(features), F.normalize(self.centres)), target)


def weighs_two_losses(module):
    log_sigma = nn.Parameter(torch.zeros(2))

    def loss(module, batch):
        logits = module(batch[0])
        losses = torch.stack([F.cross_entropy(logits, batch[1]), logits.square().mean()])
        return (torch.exp(-log_sigma) * losses + log_sigma).sum()

    return loss, [log_sigma], torch.optim.Adam([*module.parameters(), log_sigma], lr=0.05)


def has_a_temperature_of_its_own(module):
    log_alpha = torch.zeros(1, requires_grad=True)  # no Parameter, with an optimizer of its own

    def loss(module, batch):
        logits = module(batch[0])
        return F.cross_entropy(logits, batch[1]) + (log_alpha.exp() * (logits.mean().detach() - 1)).mean()

    return loss, [log_alpha], [torch.optim.Adam(module.parameters(), lr=0.05), torch.optim.SGD([log_alpha], lr=0.1)]


def has_a_criterion_with_weights(module):
    criterion = Cosine()
    groups = [{"params": module.parameters()}, {"params": criterion.parameters(), "lr": 0.1}]
    return lambda module, batch: criterion(module(batch[0]), batch[1]), [criterion.centres], torch.optim.AdamW(groups)


def holds_them_in_containers(module):
    kept = types.SimpleNamespace(scale=nn.Parameter(torch.tensor(1.0)))
    shifts, pair = {"shift": nn.Parameter(torch.zeros(4))}, (nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)))
    several = [kept.scale, shifts["shift"], *pair]

    def loss(module, batch):
        logits = (module(batch[0]) * kept.scale + shifts["shift"]) * pair[0] + pair[1]
        return F.cross_entropy(logits, batch[1]) + 0.01 * sum(p.square().sum() for p in several)

    return loss, several, torch.optim.SGD([*module.parameters(), *several], lr=0.1, momentum=0.9)


def trains_them_alone(module):
    shift = nn.Parameter(torch.zeros(4))
    loss = lambda module, batch: F.cross_entropy(module(batch[0]).detach() + shift, batch[1])
    return loss, [shift], torch.optim.Adam([shift], lr=0.1)


def trained(make):
    module = net()
    loss, loose, optimizers = make(module)
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    losses = []
    for batch in batches():
        for optimizer in several:
            optimizer.zero_grad()
        value = loss(module, batch)
        value.backward()
        for optimizer in several:
            optimizer.step()
        losses.append(float(value.detach()))
    return losses, [*module.parameters(), *loose]


@pytest.mark.parametrize(
    "make",
    [
        weighs_two_losses,
        has_a_temperature_of_its_own,
        has_a_criterion_with_weights,
        holds_them_in_containers,
        trains_them_alone,
    ],
)
def test_parameters_around_the_loss_train_as_in_torch(make):
    theirs, their_tensors = trained(make)
    module = net()
    loss, loose, optimizer = make(module)
    step = jaxtrain.compile(module, loss, optimizer)
    losses = [float(step(batch)) for batch in batches()]
    step.sync()
    assert losses == pytest.approx(theirs, rel=1e-5)
    torch.testing.assert_close([*module.parameters(), *loose], their_tensors, rtol=1e-4, atol=1e-5)
    assert step.torch is None
    assert not any(isinstance(part, LooseParameters) for part in module.modules())
    assert [isinstance(tensor, nn.Parameter) for tensor in loose] == [
        make is not has_a_temperature_of_its_own for _ in loose
    ]


def test_a_loop_with_them_resumes_with_the_same_bits():
    def made():
        module = net()
        loss, loose, optimizer = weighs_two_losses(module)
        return jaxtrain.compile(module, loss, optimizer), module, loose

    step, module, _ = made()
    for batch in batches()[:3]:
        step(batch)
    state = copy.deepcopy(step.state_dict())
    assert state["module"].keys() == module.state_dict().keys()
    rest = [float(step(batch)) for batch in batches()[3:]]
    step, module, loose = made()
    step.load_state_dict(state)
    assert [float(step(batch)) for batch in batches()[3:]] == rest
    x = batches()[0][0]
    evaluated = step.eval()(x)
    torch.testing.assert_close(evaluated, module(x).detach())


def test_an_optimizer_of_another_module_is_still_refused():
    module = net()
    with pytest.raises(UserError, match="4 of the 4 parameters of group 0 are not the module's"):
        jaxtrain.compile(module, lambda m, b: m(b[0]).mean(), torch.optim.SGD(net().parameters(), lr=0.1))
