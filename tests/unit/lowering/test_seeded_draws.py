"""Numbers that a forward draws after a seed of its own, the same at every call in torch, are refused."""

import types

import pytest
import torch
from torch import nn

from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel

SHARED = torch.Generator()


class Draws(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise, self.own = noise, torch.Generator()
        self.options = types.SimpleNamespace(generators=[torch.Generator()])

    def forward(self, x):
        return x + self.noise(self, x)


def seeded(module, x):
    torch.manual_seed(0)
    return torch.randn_like(x)


def forked(module, x):
    with torch.random.fork_rng():
        return torch.rand(3)


def state_set(module, x):
    torch.set_rng_state(torch.get_rng_state())
    return torch.rand(3)


def made(module, x):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(3, generator=generator)


def made_in_place(module, x):
    return torch.empty(3).normal_(generator=torch.Generator())


def seeded_attribute(module, x):
    module.own.manual_seed(0)
    return torch.rand(3, generator=module.own)


def seeded_global(module, x):
    return torch.empty(3).normal_(generator=SHARED.manual_seed(0))


def given_a_state(module, x):
    module.own.set_state(SHARED.get_state())
    return torch.nn.init.normal_(torch.empty(3), generator=module.own)


NOISE = [seeded, forked, state_set, made, made_in_place, seeded_attribute, seeded_global, given_a_state]


@pytest.mark.parametrize("noise", NOISE)
def test_refused(noise):
    with pytest.raises(UnsupportedModel, match="the numbers that follow are the same at every call"):
        from_torch(Draws(noise), (torch.ones(3),), modes=("training",))


def _kept_in_a_closure():
    generator = torch.Generator()
    return lambda module, x: torch.rand(3, generator=generator)


@pytest.mark.parametrize(
    "noise",
    [
        lambda module, x: torch.rand(3, generator=SHARED),
        lambda module, x: torch.rand(3, generator=module.own),
        lambda module, x: torch.rand(3, generator=module.options.generators[0]),
        _kept_in_a_closure(),
        lambda module, x: torch.utils.checkpoint.checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=False),
    ],
    ids=["global", "attribute", "inside an attribute", "closure", "checkpoint"],
)
def test_a_generator_that_lasts_is_one_more_source_of_random_numbers(noise):
    before = SHARED.get_state()
    model = from_torch(Draws(noise), (torch.ones(3),), modes=("training",))
    assert model is not None
    assert torch.equal(SHARED.get_state(), before)
