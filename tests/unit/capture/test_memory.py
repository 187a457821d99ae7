"""Views, aliases, writes and strides under torch.compile(backend="jaxtrain"): what torch's memory holds afterwards."""

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.capture.sides import assert_same, draw
from torch_bridge.capture.memory import Layout, dense_order


def linear():
    return nn.Linear(6, 6)


def test_views_of_results_inputs_and_parameters_stay_views():
    def views(module, x):
        h = module(x)
        return h, h.t(), h[:, ::2], x.view(-1), x[1:], module.weight.t()

    def run(module, compiler, number):
        results = compiler(views)(module, draw(4, 6, seed=number))
        return [*results, *(value._is_view() for value in results), sum(v.sum() * k for k, v in enumerate(results))]

    assert_same(linear, run)


def test_an_output_that_is_an_input_is_the_same_object():
    def same(module, x):
        return x, module(x)

    def run(module, compiler, number):
        x = draw(4, 6, seed=number)
        first, second = compiler(same)(module, x)
        return [first is x, second.sum()]

    assert_same(linear, run)


@pytest.mark.parametrize("clones", [True, False])
def test_writing_to_an_input_later_changes_views_and_no_clone(clones):
    def part(module, x):
        return (x.clone() if clones else x[1:]), module.weight * 2

    def run(module, compiler, number):
        x = draw(4, 6, seed=number)
        shown, weight = compiler(part)(module, x)
        x.zero_()
        return [shown, weight.sum()]

    assert_same(linear, run)


def test_writes_to_inputs_and_their_views():
    def writes(module, x, counts):
        x.mul_(2)
        counts.add_(1)
        x[0] = 3
        x[1:3].add_(1)
        x.t()[0] = 5
        return module(x)

    def run(module, compiler, number):
        x, counts = draw(4, 6, seed=number), torch.arange(3)
        return [x, counts, compiler(writes)(module, x, counts).sum()]

    assert_same(linear, run)


def test_writes_to_one_of_two_inputs_that_share_memory():
    def writes(module, x, part):
        part.mul_(3)
        return module(x) + part.sum()

    def run(module, compiler, number):
        x = draw(4, 6, seed=number)
        return [x, compiler(writes)(module, x, x[1:]).sum()]

    assert_same(linear, run)


def test_a_write_to_a_result_changes_no_other():
    def run(module, compiler, number):
        x = draw(4, 6, seed=number)
        with torch.no_grad():
            first, second = compiler(module)(x), compiler(module)(x)
            first.zero_()
            first += 1
        return [first, second, compiler(module)(x).sum()]

    assert_same(linear, run)


def test_a_parameter_written_between_forward_and_backward_raises_as_in_torch():
    def run(module, compiler, number):
        loss = compiler(module)(draw(4, 6, seed=number).requires_grad_()).pow(2).mean()
        with torch.no_grad():
            module.weight.add_(1)
        try:
            loss.backward()
        except RuntimeError as error:
            return ["modified by an inplace operation" in str(error)]
        return [False]

    assert_same(linear, run)


def test_new_memory_of_a_parameter_is_read():
    def run(module, compiler, number):
        if number == 1:
            module.weight.data = module.weight.data * 2
        return [compiler(module)(draw(4, 6, seed=number)).pow(2).mean()]

    assert_same(linear, run)


def test_channels_last_results_have_torchs_strides():
    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)

    def run(module, compiler, number):
        y = compiler(module)(draw(2, 3, 8, 8, seed=number).contiguous(memory_format=torch.channels_last))
        return [y, y.permute(0, 2, 3, 1).pow(2).mean()]

    assert_same(make, run)


def test_inputs_that_are_not_contiguous():
    def several(module, x, y, z):
        return (module(x) + module(y) + module(z)).pow(2).mean()

    def run(module, compiler, number):
        x, y = draw(6, 4, seed=number).t(), draw(4, 12, seed=number)[:, ::2]
        return [compiler(several)(module, x, y, draw(1, 6, seed=number).expand(4, 6))]

    assert_same(linear, run)


def test_expanded_and_permuted_results():
    def shapes(module, x):
        row = module(x).sum(0, keepdim=True)
        return row.expand(5, 6), row.expand(5, 6).clone(), module(x).permute(1, 0)

    def run(module, compiler, number):
        results = compiler(shapes)(module, draw(4, 6, seed=number))
        return [*results, results[0].pow(2).mean() + results[2].sum()]

    assert_same(linear, run)


def test_empty_tensors_and_tensors_without_axes():
    def numbers(module, empty, a, b):
        return a * b, a > b, module(empty), module(empty).sum() + module.weight.sum() * a + b

    def run(module, compiler, number):
        return [*compiler(numbers)(module, torch.zeros(0, 6), torch.tensor(1.5 + number), torch.tensor(2))]

    assert_same(linear, run)


def test_a_layout_stores_and_shows_any_strides():
    forms = [((2, 3), (1, 2)), ((2, 3), (3, 1)), ((4, 3), (0, 1)), ((2, 3), (8, 2)), ((1, 3, 2), (9, 1, 3))]
    for shape, strides in forms:
        layout = Layout(shape, strides, torch.float32)
        value = draw(*(n if s else 1 for n, s in zip(shape, strides, strict=True))).expand(shape)
        shown = layout.show(layout.store(jnp.array(value.numpy())))
        assert torch.equal(shown, value)
        assert [a for a, n in zip(shown.stride(), shape, strict=True) if n > 1] == [
            a for a, n in zip(strides, shape, strict=True) if n > 1
        ]


def test_the_order_of_axes_in_memory():
    assert dense_order((2, 3), (3, 1)) is None
    assert dense_order((2, 3), (1, 2)) == (1, 0)
    assert dense_order((2, 3), (6, 2)) is None
    assert dense_order((2, 3, 4, 4), (48, 1, 12, 3)) == (0, 2, 3, 1)


def test_a_layer_of_a_tied_weight():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.embedding(ids)))

    def run(module, compiler, number):
        ids = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(number))
        return [F.cross_entropy(compiler(module)(ids).flatten(0, 1), ids.flatten())]

    assert_same(Tied, run)
