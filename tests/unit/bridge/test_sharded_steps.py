"""`jaxtrain.compile(shard=...)`: the losses and weights of one device, on eight, with weights and moments split."""

import copy

import jax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import UserError

STRATEGIES = {
    "ddp": "ddp",
    "shard_grad_op": "shard_grad_op",
    "fsdp": "fsdp",
    "hsdp": {"strategy": "hsdp", "replicas": 2},
    "tensor": {"strategy": "fsdp", "tensor": 2, "rules": {r"body\.0\.weight": ["tensor", None]}},
}
SPLIT = {"ddp": (1, 1), "shard_grad_op": (1, 8), "fsdp": (8, 8), "hsdp": (4, 4), "tensor": (8, 8)}  # weight, moment


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 32))

    def forward(self, ids):
        return self.body(self.table(ids).mean(1))


def loss(module, batch):
    return F.cross_entropy(module(batch), batch[:, 0])


def batches(rows=16):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 32, (rows, 6), generator=draw) for _ in range(6)]


def made(**options):
    torch.manual_seed(0)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    return module, jaxtrain.compile(module, loss, optimizer, clip_norm=1.0, **options)


def assert_same(module, other):
    for (name, ours), theirs in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_eight_devices_train_as_one(name, accumulate):
    alone, one = made(devices=jax.devices()[:1], accumulate=accumulate)
    module, step = made(shard=STRATEGIES[name], accumulate=accumulate)
    for batch in batches():
        assert float(step(batch)) == pytest.approx(float(one(batch)), rel=1e-5)
    assert_same(module, alone)
    pieces = lambda array: array.size // array.addressable_shards[0].data.size
    weight, moment = step.weights.arrays["body.0.weight"], step.opt_state["body.0.weight"]["momentum_buffer"]
    assert (pieces(weight), pieces(moment)) == SPLIT[name]
    assert [program.jitted._cache_size() for program in step.programs] == [1] * accumulate


def test_a_sharded_state_goes_on_with_another_number_of_devices():
    whole, step = made(shard="fsdp")
    for batch in batches():
        step(batch)
    step.sync()
    _, first = made(shard="fsdp")
    for batch in batches()[:3]:
        first(batch)
    state = copy.deepcopy(first.state_dict())
    parts, second = made(shard="fsdp", devices=jax.devices()[:2])
    second.load_state_dict(state)
    for batch in batches()[3:]:
        second(batch)
    second.sync()
    assert_same(parts, whole)


def test_rows_that_eight_devices_do_not_divide_count_once():
    alone, one = made(devices=jax.devices()[:1])
    module, step = made(shard="fsdp")
    for batch in batches(rows=13):
        assert float(step(batch)) == pytest.approx(float(one(batch)), rel=1e-5)
    assert_same(module, alone)


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        ("zero3", r"shard: strategy: .*'ddp', 'ddp_local', 'fsdp', 'shard_grad_op' or 'hsdp', got 'zero3'"),
        ({"strategy": "hsdp", "replicas": 3}, "shard.replicas: 3 does not divide 8 devices"),
        ({"strategy": "fsdp", "tensor": 3}, "shard.tensor: 3 does not divide 8 devices"),
        ("ddp_local", "shard: 'ddp_local' is not offered for a compiled step"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_before_the_first_step(shard, why):
    with pytest.raises(UserError, match=why):
        made(shard=shard)
