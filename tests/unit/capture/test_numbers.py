"""Dtypes, integers beyond 32 bits, Python numbers and sizes under torch.compile(backend="jaxtrain")."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.capture.sides import assert_same, draw


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))


@pytest.mark.parametrize("numbers", [[2**31 - 1, -(2**31), 2**40, 5], [2**31 - 20, -(2**31) + 17, 7, 5]])
def test_integers_of_64_bits_are_exact(numbers):
    def arithmetic(module, a):
        whole = a * 7919, (a * 2654435761) % 1000, a + 1, a + 100, -a, a.sum(), a.cumsum(0), a.max(), a.clone()
        return *whole, a.to(torch.float32), module[0].weight.sum()

    assert_same(net, lambda module, compiler, number: [*compiler(arithmetic)(module, torch.tensor(numbers))])


def test_small_integers_and_bools_keep_their_types():
    def arithmetic(module, a, b, c, d, e):
        return a * 2, b + 1, c - 3, a.long() * 1000, c.sum(), d * 3, d > 5, d.float().mean(), e & ~e, e.sum()

    def run(module, compiler, number):
        whole = lambda dtype: torch.arange(-3, 4, dtype=torch.int64).to(dtype)
        a, b, c = map(whole, (torch.int8, torch.int16, torch.int32))
        return [*compiler(arithmetic)(module, a, b, c, whole(torch.uint8), whole(torch.int8) > 0)]

    assert_same(net, run)


def test_float64_is_computed_in_float64():
    def run(module, compiler, number):
        return [compiler(module)(draw(4, 6, seed=number).double()).pow(2).mean()]

    assert_same(lambda: net().double(), run, tolerance=1e-12)


def test_float64_with_classes():
    def loss(module, ids):
        return F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())

    def run(module, compiler, number):
        return [compiler(loss)(module, torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(number)))]

    make = lambda: nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10)).double()
    assert_same(make, run, tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_of_16_bits(dtype):
    def run(module, compiler, number):
        return [compiler(module)(draw(4, 6, seed=number).to(dtype)).float().pow(2).mean()]

    assert_same(lambda: net().to(dtype), run, tolerance=2e-2)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    def loss(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        return y, y.float().pow(2).mean()

    def run(module, compiler, number):
        if inside:
            return [*compiler(loss)(module, draw(4, 6, seed=number))]
        with torch.autocast("cpu", torch.bfloat16):
            y = compiler(module)(draw(4, 6, seed=number))
            return [y, y.float().pow(2).mean()]

    assert_same(net, run, tolerance=2e-2)


def test_complex_numbers():
    def forward(module, x):
        spectrum = torch.fft.fft(module[0](x))
        return spectrum, spectrum.conj(), spectrum.abs().pow(2).mean()

    assert_same(net, lambda module, compiler, number: [*compiler(forward)(module, draw(4, 6, seed=number))])


def test_complex_inputs_that_are_conjugated_lazily():
    def parts(module, x):
        return x * 2, x.real, x.imag, torch.view_as_real(x.resolve_conj()), module[0].weight.sum()

    def run(module, compiler, number):
        return [*compiler(parts)(module, torch.complex(draw(3), draw(3, seed=1)).conj())]

    assert_same(net, run)


def test_batches_of_changing_size():
    def loss(module, x):
        rows = x.shape[0]
        return module(x).sum() / rows**0.5 + torch.arange(rows).float().sum(), x.new_zeros(rows * 2), rows * 3

    def run(module, compiler, number):
        value, zeros, rows = compiler(loss)(module, draw([4, 5, 7, 3][number], 6, seed=number))
        return [zeros, rows, value]

    assert_same(net, run, steps=4)


def test_numbers_that_change_between_calls():
    def loss(module, x, scale, count):
        return torch.arange(3) + count, module(x).pow(2).mean() * scale + count**2 + scale

    def run(module, compiler, number):
        return [*compiler(loss)(module, draw(4, 6, seed=number), 0.5 + number / 3, 5 + number)]

    assert_same(net, run, steps=4)


def test_dynamic_sizes_from_the_first_call():
    torch._dynamo.reset()
    from torch_bridge.capture.backend import jaxtrain

    module = net()
    compiled = torch.compile(module, backend=jaxtrain, dynamic=True, fullgraph=True)
    for rows in (4, 9):
        assert torch.allclose(compiled(draw(rows, 6)), module(draw(rows, 6)), atol=1e-6)


def test_selections_by_a_mask_in_pieces():
    def loss(module, x, y):
        keep = y > 0
        return F.mse_loss(module(x)[keep], y[keep])

    def run(module, compiler, number):
        return [compiler(loss)(module, draw(8, 6, seed=number), draw(8, 1, seed=number + 9))]

    assert_same(net, run)
