"""Gradients that the user's code defines, asks for or looks at, under torch.compile(backend="jaxtrain")."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit.capture.sides import assert_same, draw, plain, raises


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return -ctx.scale * slope * torch.sigmoid(x), None


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.inner(x))

    def inner(self, x):
        return torch.tanh(self.a(x))


def _mean_square(module, compiler, number):
    return [compiler(module)(draw(4, 6, seed=number)).pow(2).mean()]


def test_an_autograd_function_keeps_its_backward():
    class Own(Parts):
        def inner(self, x):
            return Reversed.apply(super().inner(x), 0.5)

    assert_same(Own, _mean_square)


def test_a_checkpoint():
    class Checkpointed(Parts):
        def inner(self, x):
            return checkpoint(super().inner, x, use_reentrant=False)

    assert_same(Checkpointed, _mean_square)


def test_a_checkpoint_repeats_its_dropout():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 512), nn.Linear(512, 1)

        def forward(self, x):
            return self.b(checkpoint(lambda x: F.dropout(torch.tanh(self.a(x)), 0.5), x, use_reentrant=False))

    def run(module, compiler, number):
        torch.manual_seed(3)
        compiler(module)(draw(1, 6, seed=number)).sum().backward()
        forward, backward = module.b.weight.grad[0] != 0, module.a.bias.grad != 0
        module.zero_grad(set_to_none=True)
        return [torch.equal(forward, backward), abs(float(forward.float().mean()) - 0.5) < 0.1]

    assert_same(Dropped, run)


def test_hooks_of_modules_tensors_and_parameters():
    def make():
        module = net()
        module[0].register_forward_hook(lambda module, inputs, output: output * 2)
        module[2].weight.register_hook(lambda slope: slope * 3)
        return module

    class Hooked(Parts):
        def inner(self, x):
            h = super().inner(x)
            h.register_hook(lambda slope: slope * 2 + 1)
            return h

    assert_same(make, _mean_square)
    assert_same(Hooked, _mean_square)


def test_a_module_backward_hook():
    def make():
        module = net()
        module[1].register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
        return module

    assert_same(make, _mean_square)


def test_gradients_of_inputs_that_are_no_leaves():
    def run(module, compiler, number):
        x = draw(4, 6, seed=number).requires_grad_()
        h = (x * 2).sin()
        h.retain_grad()
        compiler(module)(h).mean().backward()
        return [x.grad, h.grad]

    assert_same(net, run)


def test_backward_twice_and_accumulated():
    def run(module, compiler, number):
        loss = compiler(module)(draw(4, 6, seed=number)).pow(2).mean()
        loss.backward(retain_graph=True)
        once = module[0].weight.grad.clone()
        loss.backward()
        compiler(module)(draw(4, 6, seed=9)).pow(2).mean().backward()
        return [once]

    assert_same(net, run)


def test_a_gradient_of_a_gradient_raises_torchs_own_error():
    def run(module, compiler, number):
        x = draw(4, 6, seed=number).requires_grad_()
        (slope,) = torch.autograd.grad(compiler(module)(x).sum(), x, create_graph=True)
        if compiler is not plain:
            assert "does not currently support double backward" in raises(RuntimeError, slope.pow(2).sum().backward)
        module.zero_grad(set_to_none=True)
        return [slope.detach()]

    assert_same(net, run)


def test_a_parameter_that_no_result_needs_has_no_gradient():
    class Unused(Parts):
        def forward(self, x):
            return self.a(x)

    def run(module, compiler, number):
        loss = _mean_square(module, compiler, number)[0]
        loss.backward(retain_graph=True)
        return [module.b.weight.grad is None]

    assert_same(Unused, run)


def test_a_part_without_gradient_and_a_graph_break():
    class Broken(Parts):
        def inner(self, x):
            with torch.no_grad():
                target = self.a(x)
            h = self.a(x) - 2 * target
            if h.sum() > 0:
                h = h * 2
            return h

    assert_same(Broken, _mean_square)


def test_batch_norm_in_both_modes():
    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))

    def run(module, compiler, number):
        module.train(number % 2 == 0)
        return [compiler(module)(draw(2, 3, 8, 8, seed=number)).pow(2).mean()]

    assert_same(make, run)


def test_attention_with_masks_and_biases():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.bias, self.row = nn.Linear(8, 24), nn.Parameter(draw(2, 5, 5)), nn.Parameter(draw(5))

        def forward(self, x, mask):
            q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True) + F.scaled_dot_product_attention(q, k, v, mask)
            y = y + F.scaled_dot_product_attention(q, k, v, self.bias)
            return y + F.scaled_dot_product_attention(q, k, v, self.row, scale=0.3)

    def run(module, compiler, number):
        mask = (draw(5, 5, seed=number) > 0) | torch.eye(5, dtype=torch.bool)
        return [compiler(module)(draw(2, 5, 8, seed=number), mask).pow(2).mean()]

    assert_same(Attention, run)


def test_an_encoder_layer_trains_and_evaluates():
    def run(module, compiler, number):
        module.train(number < 2)
        with torch.set_grad_enabled(number < 2):
            return [compiler(module)(draw(2, 5, 8, seed=number)).pow(2).mean()]

    make = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    assert_same(make, run)  # in evaluation it is one operator of torch's


def test_pooling_resizing_and_sampling():
    def forward(module, x):
        y = module(x)
        parts = [F.max_pool2d(y, 3, 2, 1), F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 3), F.adaptive_max_pool2d(y, 2)]
        parts += [F.interpolate(y, scale_factor=2, mode="bilinear"), F.pixel_shuffle(y, 2), F.unfold(y, 3)]
        parts += [F.grid_sample(y, torch.full((2, 3, 3, 2), 0.3), align_corners=False)]
        return sum(part.pow(2).mean() for part in parts)

    run = lambda module, compiler, number: [compiler(forward)(module, draw(2, 3, 10, 10, seed=number))]
    assert_same(lambda: nn.Conv2d(3, 4, 3), run, steps=1)
