"""A parameter that backward() does not reach has no gradient: with weight decay, zeros would move it."""

import copy

import pytest
import torch
from torch import nn

from torch_bridge.capture.module_call import compile_calls


class Heads(nn.Module):
    """Three heads on one body, one of them transposed and one expanded, in one piece or two."""

    def __init__(self, pieces: int):
        super().__init__()
        torch.manual_seed(0)
        self.pieces, self.body = pieces, nn.Linear(3, 4)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 2) for name in "abc"})

    def forward(self, x):
        h = self.body(x).tanh()
        if self.pieces == 2:
            torch._dynamo.graph_break()
        found = {name: head(h) for name, head in self.heads.items()}
        return found | {"b": found["b"].t(), "c": found["c"].sum(1, keepdim=True).expand(-1, 5)}


def gradients(module, reached):
    outputs = module(torch.ones(5, 3))
    sum(
        (outputs[name] * torch.arange(5.0 if name == "b" else len(outputs[name][0]))).sum() for name in reached
    ).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("reached", ["a", "b", "c", "ab", "abc"])
def test_heads_that_the_loss_leaves_out_have_no_gradient(pieces, reached):
    module = Heads(pieces)
    wanted = gradients(copy.deepcopy(module), reached)
    compile_calls([module])
    got = gradients(module, reached)
    assert [name for name, grad in got.items() if grad is None] == [n for n, grad in wanted.items() if grad is None]
    torch.testing.assert_close(*[{n: g for n, g in found.items() if g is not None} for found in (got, wanted)])


def test_a_frozen_head_under_weight_decay_stays_where_it_is():
    module = Heads(1)
    before = module.heads["b"].weight.detach().clone()
    compile_calls([module])
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.5)
    gradients(module, "a")
    optimizer.step()
    assert torch.equal(module.heads["b"].weight, before)
