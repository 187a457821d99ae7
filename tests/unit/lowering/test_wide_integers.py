"""Integers that leave 32 bits are computed in 64: hashes, products of ids, long sums."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain.errors import UserError
from torch_bridge.from_torch import from_torch

IDS = torch.tensor([[1, 7, 123456789], [2147483647, 0, 5]])


class Rule(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule
        self.register_buffer("primes", torch.tensor([2654435761, 40503, 97]), persistent=False)
        self.table = nn.Embedding(101, 2)
        nn.init.constant_(self.table.weight, 1.0)
        self.table.weight.data[:, 0] = torch.arange(101.0)

    def forward(self, ids):
        return self.rule(self, ids)


def filled(x):
    x[0, 1:] = x[1, 0]
    return x


RULES = {
    "hash": lambda self, ids: self.table((ids * 2654435761) % 101),
    "hash_of_a_buffer": lambda self, ids: self.table((ids * self.primes).sum(-1) % 101),
    "shifted": lambda self, ids: self.table(((ids << 20) ^ (ids >> 3)) % 101),
    "pairs": lambda self, ids: self.table((ids[:, :1] * 2147483647 + ids) % 101),
    "as_float": lambda self, ids: (ids + ids).float(),
    "compared": lambda self, ids: (ids + ids) > 2**31,
    "summed": lambda self, ids: self.table(ids.sum(-1) % 101),
    "output": lambda self, ids: ids * 3,
    "sorted": lambda self, ids: torch.sort(ids * 3)[0],
    "order": lambda self, ids: torch.argsort(ids * 3),
    "largest": lambda self, ids: torch.topk(ids * 3, 2)[0],
    "filled": lambda self, ids: filled(ids * 3),
    "rows": lambda self, ids: self.table.weight[torch.where(ids * 3 > 100, 0, ids * 3)],
}


@pytest.mark.filterwarnings("error:Explicitly requested dtype")
@pytest.mark.parametrize("name", RULES)
def test_equals_torch(name):
    module = Rule(RULES[name]).eval()
    model = from_torch(module, IDS, ["evaluation"])
    ours = jax.jit(lambda ids: model(ids))(IDS.numpy().astype(np.int32))
    np.testing.assert_array_equal(np.asarray(ours), module(IDS).detach().numpy())


FLOATS = torch.tensor([[0.5, -1.7, 3e9], [float("nan"), float("inf"), -4e9]])
FROM_FLOATS = {
    "truncated": lambda self, x: x.long(),
    "hashed": lambda self, x: self.table((x[:1] * 1e3).long() % 101),
    "same type": lambda self, x: x.type_as(self.primes) // 7,
    "without a 64-bit form": lambda self, x: (x[:1, :2] * 2).long().cummax(-1)[0],
}


@pytest.mark.parametrize("name", FROM_FLOATS)
def test_floats_beyond_32_bits_become_torchs_integers(name):
    module = Rule(FROM_FLOATS[name]).eval()
    model = from_torch(module, FLOATS, ["evaluation"])
    ours = jax.jit(lambda x: model(x))(FLOATS.numpy())
    np.testing.assert_array_equal(np.asarray(ours), module(FLOATS).detach().numpy())


def test_ids_beyond_32_bits_are_taken_outside_jit():
    module, ids = Rule(RULES["hash"]).eval(), torch.tensor([2**40 + 3, 5])
    model = from_torch(module, torch.tensor([1, 2]), ["evaluation"])
    np.testing.assert_array_equal(np.asarray(model(ids.numpy())), module(ids).detach().numpy())


def test_a_small_sum_stays_in_32_bits():
    module = Rule(lambda self, ids: (ids > 5).long().cumsum(-1) + 1).eval()
    assert from_torch(module, IDS, ["evaluation"])(IDS.numpy().astype(np.int32)).dtype == np.int32


def test_an_operator_without_a_64_bit_form_is_refused_by_name():
    model = from_torch(Rule(lambda self, ids: torch.cummax(ids * 3, -1)[0]), IDS, ["evaluation"])
    with pytest.raises(UserError, match=r"aten\.cummax.* of integers that may leave 32 bits.*, at .*wide_integers"):
        model(IDS.numpy().astype(np.int32))


def test_a_saved_buffer_that_32_bits_cannot_hold_is_kept_in_64():
    module = Rule(lambda self, ids: self.table((ids * self.salt).sum(-1) % 101)).eval()
    module.register_buffer("salt", torch.tensor([3_000_000_019]))
    ours = jax.jit(from_torch(module, IDS, ["evaluation"]).__call__)(IDS.numpy().astype(np.int32))
    np.testing.assert_array_equal(np.asarray(ours), module(IDS).detach().numpy())
