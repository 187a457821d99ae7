"""What torch does out of sight of a graph: gradients of one's own, masks looked at, transforms, wrappers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.e2e.architectures import Architecture, check
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_two_graphs_of_a_recurrent_layer_hold_for_all_lengths(kind):
    torch.manual_seed(0)
    layer = kind(3, 4, 2, batch_first=True, bidirectional=True)
    model = from_torch(layer, (torch.zeros(2, 5, 3),), ["evaluation"])
    x = torch.randn(3, 9, 3)
    np.testing.assert_allclose(model(x.numpy(), rngs=None)[0], layer(x)[0].detach(), atol=1e-6)
    assert len(model._record.graphs()) == 2


class Packed(nn.Module):
    def forward(self, x, lengths):
        return pack_padded_sequence(x, lengths).data.mean()


def test_packed_sequences_are_refused():
    with pytest.raises(UnsupportedModel, match="it packs sequences .give padded batches"):
        from_torch(Packed(), (torch.ones(4, 2, 3), torch.tensor([4, 2])))


class Scaled(torch.autograd.Function):
    """A gradient that is not that of its forward, of two arguments, beside results without one."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.factor = factor
        ctx.save_for_backward(x, weight)
        return x * weight, x > 0

    @staticmethod
    def backward(ctx, slope, _):
        x, weight = ctx.saved_tensors
        return -ctx.factor * slope * weight, (slope * x).clamp(-0.1, 0.1).sum(0), None


scaled = Scaled.apply


class OwnGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        for layer in self.layers:
            x, _ = scaled(torch.tanh(layer(x)), self.weight, 0.5)
        return x


def test_an_autograd_function_keeps_its_own_backward():
    check(Architecture("own gradient", "", lambda: (OwnGradient(), (torch.randn(3, 4),))))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=True)


def test_a_reentrant_checkpoint_passes_gradients():
    check(Architecture("checkpoint", "", lambda: (Recomputed(), (torch.randn(3, 4),))))


class MovingAverage(nn.Module):
    """Buffers written through `.data`, as in many vector quantizers, or assigned; a parameter kept in a list too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.extra = [self.layer.weight]
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("size", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        y = self.norm(self.layer(x) @ self.extra[0])
        self.mean.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.size = self.size + y.detach().square().sum(0)
        return y + self.mean


def test_buffers_written_through_data_move_as_in_torch():
    check(Architecture("moving average", "", lambda: (MovingAverage(), (torch.randn(5, 4),)), training=True))


def test_a_mask_that_is_an_input_may_be_causal_or_not():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8, 0.0), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    check(Architecture("masked", "", lambda: (encoder, {"src": torch.randn(3, 2, 4), "mask": mask})))


class Variational(nn.Module):
    """Distributions check their arguments, GaussianNLLLoss its variances."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.loss = nn.GaussianNLLLoss(full=True)

    def forward(self, x):
        found = torch.distributions.Normal(self.layer(x), self.layer(x).exp())
        prior = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
        return torch.distributions.kl_divergence(found, prior), self.loss(self.layer(x), x, found.variance)


def test_checks_of_values_inside_torch_stand_in_no_way():
    check(Architecture("variational", "", lambda: (Variational(), (torch.randn(3, 4),))))


class Clamps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        self.weight.data.clamp_(-1, 1)
        return x @ self.weight


def test_a_forward_that_writes_a_parameter_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"writes the parameter weight\s+at .*self\.weight\.data\.clamp_"):
        from_torch(Clamps(), torch.randn(2, 4))


class Hopeless(nn.Module):
    def forward(self, x, mask):
        if x.max().item() > 1:
            x = x / 2
        for _ in range(int(mask.sum())):
            x = x + 1
        if bool((x > 0).any()):
            x = x * 2
        return torch.linalg.svdvals(x[mask]).sum()


def test_the_first_line_that_depends_on_data_is_named():
    with pytest.raises(UnsupportedModel) as caught:
        from_torch(Hopeless(), (torch.randn(3, 4), torch.tensor([True, False, True])))
    (obstacle,) = caught.value.obstacles
    assert "depends on the values of a tensor" in obstacle.what
    assert obstacle.where.endswith("if x.max().item() > 1:")
    assert "register" not in str(caught.value)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(4, 4)

    def forward(self, x):
        rows = torch.nonzero(x[:, 0] > 0)[:, 0]
        return torch.relu(self.expert(x[rows].unfold(0, 1, 1)[..., 0])).sum()


def test_what_follows_from_a_shape_of_the_data_is_not_listed_too():
    with pytest.raises(UnsupportedModel) as caught:
        from_torch(Experts(), torch.randn(3, 4))
    assert [obstacle.what.split()[0] for obstacle in caught.value.obstacles] == ["aten.unfold.default"]


class Jacobian(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return torch.func.vmap(torch.func.jacrev(self.linear))(x)


def test_a_transform_of_torch_func_is_part_of_the_model():
    module, x = Jacobian(), torch.randn(3, 4)
    np.testing.assert_allclose(from_torch(module, x)(x.numpy()), module(x).detach(), atol=1e-6)


class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("three is too many")


def test_a_module_that_fails_in_torch_is_told_so():
    with pytest.raises(UnsupportedModel, match=r"fails in torch .*three is too many\s+at .*raise ValueError"):
        from_torch(Broken(), torch.ones(3))


def test_layers_without_weights_are_named():
    with pytest.raises(UnsupportedModel, match=r"a LazyLinear has no weights yet[\s\S]*in 1"):
        from_torch(nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), torch.ones(3, 2))


def test_a_part_named_by_a_keyword_of_pythons_is_told_by_name():
    with pytest.raises(UnsupportedModel, match=r"its name, lambda, is a keyword[\s\S]*in parts\.lambda"):
        from_torch(nn.ModuleDict({"parts": nn.ModuleDict({"lambda": nn.Linear(3, 2)})}), torch.ones(3, 3))


class HeatEquation(nn.Module):
    """u, and u_t - u_xx by torch.autograd.grad."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.clone().detach().requires_grad_(True)
        u = self.layers(x)
        slope = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)[0]
        bend = torch.autograd.grad(slope[:, :1].sum(), x, create_graph=True)[0]
        return u, slope[:, 1:] - bend[:, :1]


def test_derivatives_by_inputs_are_part_of_the_model():
    check(Architecture("heat equation", "", lambda: (HeatEquation(), (torch.randn(5, 2),))))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, n=6) * self.weight, n=6)


def test_a_complex_parameter_has_torchs_gradient():
    check(Architecture("spectral", "", lambda: (Spectral(), (torch.randn(3, 6),))))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "parallel"])
def test_the_module_inside_a_wrapper_is_converted_under_its_own_names(wrap):
    model = from_torch(wrap(nn.Linear(3, 2)), torch.ones(1, 3), ["evaluation"])
    assert list(model.variables()) == ["weight", "bias"]


class ManyClasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.classes = nn.Linear(6, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], head_bias=True)

    def forward(self, x, target):
        hidden = self.layer(x)
        return (*self.classes(hidden, target), self.classes.log_prob(hidden), self.classes(hidden[0], target[0])[0])


def test_clusters_of_classes_are_one_softmax():
    check(Architecture("clusters", "", lambda: (ManyClasses(), (torch.randn(7, 6), torch.arange(0, 20, 3)))))


class Bounded(nn.Module):
    """Python's min and max of scalars, one of them a tensor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, step):
        x = x * self.scale
        return max(x.mean(), x.sum()) * min(1.0, step / 4) + max(0, x[0].sum())


@pytest.mark.parametrize("step", [1, 9])
def test_min_and_max_of_scalars_choose_as_python_does(step):
    check(Architecture("bounded", "", lambda: (Bounded(), (torch.linspace(-1, 2, 5), torch.tensor(step)))))


class Strided(nn.Module):
    def forward(self, x):
        return x.T.as_strided((3, 2), (2, 1))


def test_the_memory_of_a_view_is_not_addressed():
    with pytest.raises(
        UnsupportedModel, match=r"as_strided.default addresses the memory of a view.*\s+at .*as_strided"
    ):
        from_torch(Strided(), torch.ones(5, 4))
