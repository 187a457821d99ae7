"""User code finds a parameter by identity in a recorded call, wherever it holds it: in a set, as a key, by its id."""

import weakref

import pytest
import torch
from torch import nn

import jaxtrain
from tests.e2e.loops import torch_step
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel

HELD = {}
FOUND = {
    "an attribute": lambda module: HELD["weight"] is module.first.weight,
    "a list": lambda module: HELD["list"][1] is module.first.weight,
    "a set": lambda module: module.first.weight in HELD["set"],
    "a key": lambda module: HELD["keys"].get(module.first.weight, 0) == 2,
    "an id": lambda module: id(module.first.weight) in HELD["ids"],
    "a lookup by id": lambda module: HELD["by id"][id(module.first.weight)] == "first",
    "a tuple": lambda module: HELD["tuple"][0] is module.first.weight,
    "a weak reference": lambda module: HELD["reference"]() is module.first.weight,
    "a buffer": lambda module: HELD["mask"] is module.mask,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.ones(2))
        self.decayed, self.scales = {self.first.weight}, {self.second.weight: 3.0}
        self.order, self.names = [self.second.bias, self.first.bias], {id(self.first.weight): "first"}

    def forward(self, x):
        y = self.second(self.first(x)) * self.scales.get(self.second.weight, 1.0)
        if self.first.weight in self.decayed and self.names.get(id(self.first.weight)) == "first":
            y = y + self.order[1].sum()
        return y * 2 if self.order[0] is self.second.bias else y


def build():
    torch.manual_seed(0)
    module = Net()
    weight = module.first.weight
    HELD.update({"weight": weight, "list": [module.first.bias, weight], "set": {weight}, "keys": {weight: 2}})
    HELD.update({"tuple": (weight, 1), "reference": weakref.ref(weight)})
    HELD.update({"ids": {id(weight)}, "by id": {id(weight): "first"}, "mask": module.mask})
    return module


@pytest.mark.parametrize("name", FOUND)
def test_a_loss_finds_a_parameter_where_it_holds_it(name):
    def loss(module, batch):
        return module(batch).mean() + (module.first.weight.square().sum() if FOUND[name](module) else 0)

    x, losses = torch.ones(5, 3), {}
    for ours in (False, True):
        module = build()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        step = jaxtrain.compile(module, loss, optimizer) if ours else torch_step(module, optimizer, loss)
        losses[ours] = [float(step(x)) for _ in range(3)]
        assert FOUND[name](module)  # everything holds the parameter again
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_a_forward_finds_its_parameters_where_it_holds_them():
    Accelerator = pytest.importorskip("jaxtrain.accelerate", exc_type=ImportError).Accelerator
    module, x = build(), torch.ones(5, 3)
    expected = module(x).detach()
    prepared = Accelerator(cpu=True).prepare(module)
    torch.testing.assert_close(prepared(x).detach(), expected)
    torch.testing.assert_close(prepared.eval()(x).detach(), expected)
    assert module.order[1] is module.first.bias


def test_a_set_of_parameters_in_a_forward_is_refused():
    with pytest.raises(UnsupportedModel, match="TorchDynamo does not capture it"):
        from_torch(build(), torch.ones(5, 3))


def test_a_parameter_that_counts_its_versions_is_left_to_torch():
    module = build()
    loss = lambda module, batch: module(batch).mean() * (1 + module.first.weight._version)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), lr=0.0))
    x = torch.ones(5, 3)
    for _ in range(3):
        expected = float(loss(module, x).detach())
        assert float(step(x)) == pytest.approx(expected, rel=1e-5)
