"""Code that asks a changing number for what a tensor has, or looks it up, takes the branch that it takes in torch."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import jaxtrain

TABLE = {number: 1.0 + number for number in range(0, 40, 2)}
TEXTS = {str(number / 2): number for number in range(40)}


def item_of(number):
    try:
        return number.item()
    except AttributeError:
        return number * 2


def length_of(number):
    try:
        return len(number)
    except TypeError:
        return 4.0


def caught(compute):
    try:
        return compute()
    except Exception:
        return 0.5


ASKED = {
    "get": lambda number: TABLE.get(number, 7.0),
    "in a dict": lambda number: 2.0 if number in TABLE else 5.0,
    "in a set": lambda number: 2.0 if number in {1, 3, 5} else 3.0,
    "str": lambda number: TEXTS.get(str(number / 2), -1.0),
    "f-string": lambda number: TEXTS.get(f"{number / 2}", -1.0),
    "format": lambda number: len(f"{number:.3f}"),
    "hash": lambda number: hash(number) % 5,
    "item": item_of,
    "caught": lambda number: caught(lambda: TABLE[number]),
    "caught sine": lambda number: caught(lambda: math.sin(number)),
    "caught root": lambda number: caught(lambda: float(np.sqrt(number))),
    "caught branch": lambda number: caught(lambda: 2.0 if number > 2 else 1.0),
    "caught divmod": lambda number: caught(lambda: divmod(number, 3)[0]),
    "caught round": lambda number: caught(lambda: round(number * 1.7)),
    "caught method": lambda number: caught(lambda: number.bit_length()),
    "len": length_of,
    "hasattr of a method": lambda number: 2.0 if hasattr(number, "dim") else 3.0,
    "hasattr of a property": lambda number: 2.0 if hasattr(number, "shape") else 3.0,
    "getattr": lambda number: 2.0 if getattr(number, "ndim", None) == 0 else 3.0,
    "isscalar": lambda number: 2.0 if np.isscalar(number) else 3.0,
}


def _loss(compute, where):
    def loss(module, batch):
        return module(batch[0]).square().mean() * compute(module.number if where == "attribute" else batch[1])

    return loss


@pytest.mark.parametrize("where", ["attribute", "batch"])
@pytest.mark.parametrize("asked", ASKED)
def test_what_python_asks_of_a_changing_number_is_answered_as_in_torch(asked, where):
    torch.manual_seed(0)
    module, loss_fn = nn.Linear(3, 2), _loss(ASKED[asked], where)
    module.number = 0
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.0))
    for number in (1, 2, 3, 4):
        module.number, batch = number, (torch.ones(4, 3), number)
        assert float(step(batch)) == pytest.approx(float(loss_fn(module, batch).detach()), rel=1e-6)


def test_a_number_that_is_kept_stays_a_number():
    module = nn.Linear(3, 2)
    module.kept = None

    def loss(module, batch):
        module.kept = batch[1] * 0.1
        return module(batch[0]).square().mean()

    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), lr=0.0))
    for number in (1, 2, 3, 4):
        step((torch.ones(4, 3), number))
        assert module.kept == number * 0.1
        assert type(module.kept) is float
