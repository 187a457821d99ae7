"""Python branches on a number that changes from call to call: each way through the code is one program."""

import copy
import logging

import pytest
import torch
from torch import nn

import jaxtrain
from torch_bridge.capture.compiled_graph import CompiledGraph

CALLS = 40
WAYS = {  # with the number of records: one while the number is a constant, and one per way
    "branch": (lambda n: 2.0 if n > 15 else 1.0, 3),
    "a third as a float": (lambda n: 2.0 if n / 3 > 5 else n * 0.1, 3),
    "range": (lambda n: 1.0 + sum(0.5 for _ in range(n // 20)), 3),
    "modulo": (lambda n: 3.0 * n if n % 5 == 0 else 1.0, 3),
    "int": (lambda n: int(n / 20) + 1, 2),
    "between": (lambda n: 0.5 if 5 < n <= 10 else n * 0.01, 4),
}


def train(compute, where, calls=CALLS):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    in_torch = copy.deepcopy(module)
    count = 0

    def loss_fn(module, batch):
        number = module.number if where == "attribute" else batch[1] if where == "batch" else count
        return module(batch[0]).square().mean() * compute(number)

    module.number = in_torch.number = 0
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(in_torch.parameters(), lr=0.01)
    for number in range(calls):
        module.number = in_torch.number = count = number
        batch = torch.ones(4, 3), number
        step(batch)
        optimizer.zero_grad()
        loss_fn(in_torch, batch).backward()
        optimizer.step()
    pairs = zip(module.parameters(), in_torch.parameters(), strict=True)
    return step, max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("where", ["attribute", "closure", "batch"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_through_a_loss_is_one_record(way, where):
    compute, records = WAYS[way]
    step, difference = train(compute, where)
    assert len(step.programs) <= records  # ways that compute alike share one
    assert step.torch is None
    assert difference < 1e-6


@pytest.mark.parametrize(("where", "why"), [("attribute", "asked for 8 programs"), ("batch", "new at most calls")])
def test_more_than_eight_ways_are_told_and_left_to_torch(where, why, caplog):
    with caplog.at_level(logging.WARNING):
        step, difference = train(lambda n: float(str(n)), where, calls=40)
    assert step.torch is not None
    assert any(why in record.getMessage() for record in caplog.records)
    assert difference < 1e-6


def test_a_way_that_looks_the_number_up_becomes_a_record_per_value():
    table = {number: float(number) for number in range(20, 25)}
    step, difference = train(lambda n: table[n] if n >= 20 else 1.0, "attribute", calls=24)
    assert step.torch is None
    assert difference < 1e-6


def test_a_prepared_module_takes_the_way_of_its_number(monkeypatch):
    Accelerator = pytest.importorskip("jaxtrain.accelerate", exc_type=ImportError).Accelerator

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.step = nn.Linear(3, 2), 0

        def forward(self, x, number):
            out = self.layer(x) * (2.0 if self.step > 15 else 1.0)
            return out * 3.0 if number % 2 else out

    graphs, make = [], CompiledGraph.__init__
    monkeypatch.setattr(CompiledGraph, "__init__", lambda self, *given: graphs.append(1) or make(self, *given))
    torch.manual_seed(0)
    plain = Scaled()
    module, x = Accelerator(cpu=True).prepare(copy.deepcopy(plain)), torch.ones(4, 3)
    for training in (True, False):
        module.train(training)
        for number in range(CALLS):
            module.step = plain.step = number if training else 0
            assert torch.allclose(module(x, number), plain(x, number), atol=1e-6)
    assert 2 <= len(graphs) <= 12
