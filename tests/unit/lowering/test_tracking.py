"""What a forward tells autograd (hooks, requires_grad_, no_grad, detach) gives torch's gradients or one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from torch_bridge.datasets import to_numpy
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """forward is the function under test: (self, x) -> a tensor."""

    def __init__(self, function, prepare=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("mask", (torch.arange(16).reshape(4, 4) % 2).float())
        self.function = function
        if prepare is not None:
            prepare(self)

    def forward(self, x):
        return self.function(self, x)


def _theirs(model):
    y = model(X)
    (y * (torch.arange(y.numel()) + 1).reshape(y.shape)).sum().backward()
    return {name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}


def _ours(model):
    graph, params, rest = nnx.split(from_torch(model, X, ["evaluation"]), nnx.Param, ...)

    def loss(params):
        y = nnx.merge(graph, params, rest)(to_numpy(X))
        return (y * (jnp.arange(y.size) + 1).reshape(y.shape)).sum()

    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(jax.grad(loss)(params))}


def _hook(self, x):
    h = self.a(x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1) * self.w.detach())
    return self.b(h).tanh()


def _hook_after_a_use(self, x):
    h = self.a(x)
    y = h.sin()
    h.register_hook(lambda g: g * 3)
    return self.b(h).tanh() + y


def _two_hooks(self, x):
    h = self.a(x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    h.register_hook(lambda g: g * 2)
    return self.b(h).tanh()


def _hook_that_writes(self, x):
    h = self.a(x)
    h.register_hook(lambda g: None if g.mul_(2) is g else g)
    return self.b(h).tanh()


def _hook_with_its_tensor(self, x):
    h = self.a(x)
    h.register_hook(lambda g: g * h.detach())
    return self.b(h).tanh()


def _frozen(self, x):
    self.a.requires_grad_(False)
    return self.b(self.a(x) * self.w).tanh()


def _frozen_and_thawed(self, x):
    for p in self.a.parameters():
        p.requires_grad_(False)
    y = self.a(x * self.w)
    for p in self.a.parameters():
        p.requires_grad = True
    return self.b(y).tanh() + self.a(x)


def _no_grad(self, x):
    with torch.no_grad():
        y = self.a(x) * self.w
    return self.b(y).tanh() * self.w


def _inference(self, x):
    with torch.inference_mode():
        y = self.a(x)
    return self.b(y.clone()).tanh() * self.w


def _no_grad_complex(self, x):
    with torch.no_grad():
        z = torch.complex(self.a(x), self.b(x))
    return z.real * self.w


def _enabled_inside(self, x):
    with torch.no_grad():
        y = self.a(x)
        with torch.enable_grad():
            z = self.b(y) * self.w
        u = z * self.w
    return z.tanh() + u * self.w


def _written_under_no_grad(self, x):
    h = self.a(x)
    with torch.no_grad():
        h.mul_(2)
    return self.b(h).tanh() * self.w


def _part_written_under_no_grad(self, x):
    h = self.a(x) + 0
    with torch.no_grad():
        h[:, 0] = 0.5
    return h * self.w


def _written_through_data(self, x):
    h = self.a(x) + 0
    h.data.mul_(2)
    return h * self.w


def _data_replaced(self, x):
    h = self.a(x) + 0
    h.data = h.data * 3
    return h * self.w


def _detached_in_place(self, x):
    h = self.a(x)
    h.detach_()
    return self.b(h) * self.w


def _slope_without_graph(self, x):
    h = self.a(x)
    y = self.b(h.tanh()).tanh()
    (g,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    return y * g * self.w


GRADIENTS = [
    _hook,
    _hook_after_a_use,
    _two_hooks,
    _hook_that_writes,
    _hook_with_its_tensor,
    _no_grad,
    _inference,
    _no_grad_complex,
    _enabled_inside,
    _written_under_no_grad,
    _part_written_under_no_grad,
    _written_through_data,
    _detached_in_place,
    _slope_without_graph,
]


@pytest.mark.parametrize("forward", GRADIENTS, ids=lambda forward: forward.__name__.strip("_"))
def test_the_gradient_is_torchs(forward):
    theirs, ours = _theirs(Model(forward)), _ours(Model(forward))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


def _plain(self, x):
    return self.b(self.a(x) * self.w).tanh()


def test_hooks_of_parameters_change_their_gradients():
    def prepare(model):
        model.w.register_hook(lambda g: g * 2)
        model.a.weight.register_hook(lambda g: g * model.mask)

    theirs, ours = _theirs(Model(_plain, prepare)), _ours(Model(_plain, prepare))
    assert np.all(theirs["a.weight"][:, ::2] == 0)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


def _kept_gradient(self, x):
    h = self.a(x)
    h.register_hook(lambda g: setattr(self, "kept", g))
    return h


def _removed(self, x):
    h = self.a(x)
    h.register_hook(lambda g: g * 2).remove()
    return h


def _one_more_at_every_call(self, x):
    self.w.register_hook(lambda g: g * 2)
    return x * self.w


def _frozen_too_late(self, x):
    y = self.a(x)
    self.a.requires_grad_(False)
    return self.a(y)


def _backward(self, x):
    x = x.detach().requires_grad_()
    self.a(x).sum().backward()
    return x.grad


def _node(self, x):
    h = self.a(x)
    h.grad_fn.register_hook(lambda *slopes: None)
    return h


def _several(self, x):
    h, k = self.a(x), self.b(x)
    torch.autograd.graph.register_multi_grad_hook((h, k), print)
    return h * k


def _saved(self, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return self.a(x).sin()


REFUSED = [
    (_kept_gradient, "does not capture", "h.register_hook"),
    (_removed, "registers or removes a hook", "remove()"),
    (_one_more_at_every_call, "one more at every call", ""),
    (_frozen, "changes requires_grad", "self.a.requires_grad_(False)"),
    (_frozen_and_thawed, "changes requires_grad", "p.requires_grad_(False)"),
    (_frozen_too_late, "changes requires_grad", "self.a.requires_grad_(False)"),
    (_data_replaced, "replaces the data of a tensor", "h.data = h.data * 3"),
    (_backward, "a second call computes something else", ""),
    (_node, "grad_fn, a node of torch's autograd", "h.grad_fn"),
    (_several, "hook", "register_multi_grad_hook"),
    (_saved, "saved_tensors_hooks", "with torch.autograd"),
]


@pytest.mark.parametrize(
    ("forward", "sentence", "line"), REFUSED, ids=[case[0].__name__.strip("_") for case in REFUSED]
)
def test_a_hook_without_a_form_in_jax_is_refused_with_its_line(forward, sentence, line):
    with pytest.raises(UnsupportedModel, match=sentence) as caught:
        from_torch(Model(forward), X, ["evaluation"])
    assert line in str(caught.value)


def test_a_hook_that_runs_once_grad_is_written_is_refused_with_the_line_that_defines_it():
    prepare = lambda model: model.b.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UnsupportedModel, match=rf"hook[\s\S]*{__file__}:\d+  <lambda>[\s\S]*tensor\.register_hook"):
        from_torch(Model(_plain, prepare), X, ["evaluation"])


def _written_through_unfold(self, x):
    h = self.a(x).clone()
    h.unfold(1, 2, 2)[:, 0].mul_(3)
    return h


def test_a_write_through_unfold_is_refused():
    with pytest.raises(UnsupportedModel, match=r"it writes through unfold\(\)"):
        from_torch(Model(_written_through_unfold), X, ["evaluation"])
