"""torch.optim.Muon in a compiled step: torch's weights over 100 steps, on one device and split over eight."""

import copy
import math

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain.optim import torch_rules

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 16, generator=DRAW), torch.randint(0, 8, (64,), generator=DRAW)
OPTIONS = [
    {},
    {"nesterov": False},
    {"momentum": 0.0},
    {"momentum": 0.3, "weight_decay": 0.0},
    {"ns_steps": 3, "eps": 1e-2},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.2},
    {"ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
]


@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_100_steps_of_the_rule_are_torchs(options, shape):
    parameter = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.Muon([parameter], **options)
    rule, group = torch_rules.RULES["Muon"], optimizer.param_groups[0]
    ours = jax.numpy.asarray(parameter.detach().numpy())
    state = torch_rules.init(rule, ours, group)
    numbers = {key: np.float32(value) for key, value in torch_rules.numbers_of(rule, group).items()}
    switches = torch_rules.switches_of(rule, group)
    step = jax.jit(lambda *arrays: torch_rules.apply(rule, *arrays, numbers, switches))
    draw = torch.Generator().manual_seed(2)
    for _ in range(100):
        parameter.grad = torch.randn(shape, generator=draw)
        ours, state = step(parameter.grad.numpy(), ours, state)
        optimizer.step()
    assert np.abs(np.asarray(ours) - parameter.detach().numpy()).max() < 1e-4
    moment = optimizer.state[parameter]["momentum_buffer"].numpy()
    np.testing.assert_allclose(state["momentum_buffer"], moment, atol=1e-6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 8)


def loss(module, batch):
    return F.cross_entropy(module.head(module.body(batch[0])), batch[1])


def optimizers(module):
    """Muon for the body's matrices in two groups, AdamW for the rest.

    The rates are small, because Muon rounds to bfloat16: torch's own weights after 100 steps at 1e-2 differ by 2.6e-3
    if the first ones differ by one part in 1e7, at 2e-4 by 2e-5.
    """
    first, second = module.body[0].weight, module.body[2].weight
    others = [p for p in module.parameters() if p is not first and p is not second]
    groups = [{"params": [first]}, {"params": [second], "lr": 1e-4, "adjust_lr_fn": "match_rms_adamw"}]
    return [torch.optim.Muon(groups, 2e-4), torch.optim.AdamW(others, 1e-3)]


def batches(count=100):
    return [(X[i % 4 * 16 :][:16], Y[i % 4 * 16 :][:16]) for i in range(count)]


def in_torch(module, chosen, steps=100):
    for batch in batches(steps):
        loss(module, batch).backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()


def assert_close(module, other):
    for key, want in other.state_dict().items():
        assert (module.state_dict()[key] - want).abs().max() < 1e-4, key


@pytest.mark.parametrize("where", [{"devices": 1}, {"shard": "fsdp"}], ids=["one", "fsdp"])
def test_100_compiled_steps_with_adamw_beside_it_are_torchs(where):
    theirs, ours = Net(), Net()
    in_torch(theirs, optimizers(theirs))
    where = {"devices": jax.devices()[:1]} if "devices" in where else where
    step = jaxtrain.compile(ours, loss, optimizers(ours), **where)
    for batch in batches():
        step(batch)
    step.sync()
    assert step.torch is None
    assert_close(ours, theirs)
    if "shard" in where:
        moment = step.opt_state[0]["body.2.weight"]["momentum_buffer"]
        assert moment.addressable_shards[0].data.size * 8 == moment.size


def test_its_state_goes_both_ways_between_torch_and_a_compiled_step():
    whole, theirs, ours = Net(), Net(), Net()
    in_torch(whole, optimizers(whole), steps=12)
    chosen = optimizers(theirs)
    in_torch(theirs, chosen, steps=4)
    ours.load_state_dict(theirs.state_dict())
    mine = optimizers(ours)
    for optimizer, other in zip(mine, chosen, strict=True):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    step = jaxtrain.compile(ours, loss, mine, shard="fsdp")
    for batch in batches(8)[4:]:
        step(batch)
    step.sync()
    theirs.load_state_dict(ours.state_dict())
    for optimizer, other in zip(chosen, mine, strict=True):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    for batch in batches(12)[8:]:
        loss(theirs, batch).backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(theirs, whole)


class Muon(torch.optim.Optimizer):
    """As those of other packages: another rule by the same name."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] / math.sqrt(parameter.numel()))


def test_a_muon_of_another_package_runs_its_own_step(caplog):
    theirs, ours = Net(), Net()
    in_torch(theirs, [Muon(theirs.parameters())], steps=4)
    step = jaxtrain.compile(ours, loss, Muon(ours.parameters()))
    for batch in batches(4):
        step(batch)
    step.sync()
    assert_close(ours, theirs)
    assert "this Muon is not torch.optim.Muon" in caplog.text
