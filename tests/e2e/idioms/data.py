"""Idioms around data: numpy, random numbers, objects in batches, short batches."""

import dataclasses
import itertools
import random
import time

import numpy as np
import torch
from torch.nn import functional as F

from tests.e2e.idioms.case import Case, Net, adamw, batches, case, mse


@case
def numpy_in_the_middle():
    def loss(m, b):
        out = m(b[0])
        weight = torch.from_numpy(np.exp(-np.abs(b[1].numpy())))
        return (weight * (out - b[1]) ** 2).mean()

    return Case(Net(), loss, adamw, batches())


@case
def numpy_of_output():
    def loss(m, b):
        out = m(b[0])
        order = np.argsort(out.detach().numpy()[:, 0])
        return (out[torch.from_numpy(order.copy())] - b[1].sort(0).values).pow(2).mean()

    return Case(Net(), loss, adamw, batches())


@case
def list_of_values():
    def loss(m, b):
        out = m(b[0])
        weights = [1.0 if v > 0 else 2.0 for v in out.detach()[:, 0].tolist()]
        return (torch.tensor(weights)[:, None] * (out - b[1]) ** 2).mean()

    return Case(Net(), loss, adamw, batches())


@case
def scipy_assignment():
    from scipy.optimize import linear_sum_assignment

    def loss(m, b):
        out = m(b[0])
        cost = torch.cdist(out, b[1]) ** 2
        rows, cols = linear_sum_assignment(cost.detach().numpy())
        return F.mse_loss(out[torch.as_tensor(rows)], b[1][torch.as_tensor(cols)])

    return Case(Net(), loss, adamw, batches())


@case
def python_random():
    def before(n, m):
        random.seed(n)

    def loss(m, b):
        scale = 0.5 if random.random() < 0.5 else 1.0
        return mse(m, b) * scale

    return Case(Net(), loss, adamw, batches(), before)


@case
def numpy_random():
    def before(n, m):
        np.random.seed(n)

    def loss(m, b):
        lam = np.random.beta(0.4, 0.4)
        x = lam * b[0] + (1 - lam) * b[0].flip(0)
        return F.mse_loss(m(x), lam * b[1] + (1 - lam) * b[1].flip(0))

    return Case(Net(), loss, adamw, batches(), before)


@case
def iterator_in_loss():
    it = itertools.cycle([0.5, 1.0, 2.0])
    return Case(Net(), lambda m, b: mse(m, b) * next(it), adamw, batches())


@case
def clock():
    spent = []

    def loss(m, b):
        start = time.time()
        base = mse(m, b)
        spent.append(time.time() - start)
        return base

    return Case(Net(), loss, adamw, batches(), observe=lambda: [len(spent)])


@case
def custom_object_batch():
    class Nested:
        def __init__(self, tensors, mask):
            self.tensors, self.mask = tensors, mask

        def decompose(self):
            return self.tensors, self.mask

    data = [Nested(x, y) for x, y in batches()]

    def loss(m, b):
        x, y = b.decompose()
        return F.mse_loss(m(x), y)

    return Case(Net(), loss, adamw, data)


@case
def dataclass_batch():
    @dataclasses.dataclass
    class B:
        x: torch.Tensor
        y: torch.Tensor
        name: str = "a"

    return Case(Net(), lambda m, b: F.mse_loss(m(b.x), b.y), adamw, [B(x, y) for x, y in batches()])


@case
def short_last_batch():
    data = [*batches(5), *batches(1, rows=5), *batches(5, seed=2), *batches(1, rows=3)]
    return Case(Net(), mse, adamw, data)
