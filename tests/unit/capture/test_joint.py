"""Forward and torch's own backward of a loss as one graph: outputs and gradients are torch's."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from jaxtrain.runtime.prng import Rngs
from tests.unit.capture.sides import draw
from tests.unit.capture.test_gradients import Reversed
from torch_bridge.capture import torch_api
from torch_bridge.capture.joint import joint_graph
from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.table import Call


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 1), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.b(self.norm(torch.tanh(self.a(x))))


def compare(loss, *batch, tolerance=1e-5):
    """Compare one call of loss(module, *batch) with torch: outputs, gradients, and buffers that it writes. Return what
    was captured."""
    torch_api.reset()
    torch.manual_seed(0)
    module = Net()
    made = []

    def backend(gm, inputs):
        places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        captured = joint_graph(gm, inputs, places, 0)
        made.append(captured)

        def run(*arguments):
            numbers, every = captured.program.numbers(arguments)
            arrays = [jnp.array(every[i].detach().numpy()) for i in captured.program.tensors]
            call = lambda arrays, key: captured.run(arrays, numbers, Call(Rngs(key)))
            written, outputs, grads = jax.jit(call)(arrays, jax.random.key(0))
            leaves = [arguments[i] for i in places]
            hooked = [x.detach().requires_grad_() for x in leaves]
            for fresh, leaf in zip(hooked, leaves, strict=True):
                for hook in (leaf._backward_hooks or {}).values():
                    fresh.register_hook(hook)
            given = dict(zip(places, hooked, strict=True))
            with sdpa_kernel(SDPBackend.MATH):  # the kernel that torch can differentiate twice
                wanted = gm(*(given.get(i, x) for i, x in enumerate(arguments)))
                slopes = torch.autograd.grad(wanted[0], hooked, allow_unused=True)
            assert [p for p, s in zip(places, slopes, strict=True) if s is not None] == list(captured.gradients)
            for place, slope in zip(places, slopes, strict=True):
                if slope is not None:
                    assert torch.allclose(torch.tensor(grads[place].tolist()), slope, atol=tolerance)
            for got, want in zip(outputs, wanted, strict=True):
                if isinstance(want, torch.Tensor):
                    assert torch.allclose(torch.tensor(got.tolist()).double(), want.double(), atol=tolerance)
            for place, value in written.items():
                want = arguments[place].double()
                assert torch.allclose(torch.tensor(value.tolist()).double(), want, atol=tolerance)
            return wanted

        return run

    torch.compile(loss, backend=backend, fullgraph=True)(module, *batch)
    (captured,) = made
    return captured


def test_a_loss_its_outputs_and_written_buffers():
    def loss(module, x, y):
        out = module(x)
        return F.mse_loss(out, y), out.detach(), (out > 0).sum()

    captured = compare(loss, draw(5, 8), draw(5, 1))
    assert captured.outputs == (torch.float32, torch.float32, torch.int64)
    assert len(captured.mutated) == 3  # of the batch norm
    assert len(captured.gradients) == 6


def test_own_functions_checkpoints_and_parts_without_gradient():
    def loss(module, x):
        with torch.no_grad():
            target = module(x)
        h = checkpoint(lambda x: Reversed.apply(torch.tanh(module.a(x)), 0.5), x, use_reentrant=False)
        return (module.b(h) - target).pow(2).mean()

    compare(lambda module, x: (loss(module, x),), draw(5, 8))


def test_gradients_that_the_loss_asks_for():
    def loss(module, x):
        h = torch.tanh(module.a(x))
        y = F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None]).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y.pow(2) + slope.pow(2).sum() + module.b(h).pow(2).mean()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compare(lambda module, x: (loss(module, x),), draw(5, 8).requires_grad_(), tolerance=1e-4)


def test_attention_is_one_operator_with_its_own_backward():
    def loss(module, x):
        h = module.a(x)[:, None]
        return F.scaled_dot_product_attention(h, h, h, is_causal=True).pow(2).mean()

    captured = compare(lambda module, x: (loss(module, x),), draw(2, 5, 8))
    names = [str(node.target) for node in captured.program.module.graph.nodes]
    assert names.count("torch_bridge.attention.default") == 1
    assert names.count("torch_bridge.attention_backward.default") == 1


def test_an_operator_without_lowering_is_named():
    def loss(module, x):
        return (torch.geqrf(module(x).detach())[1].sum() + module(x).sum(),)

    with pytest.raises(Exception, match="no lowering for aten.geqrf.default") as caught:
        compare(loss, draw(5, 8))
    assert isinstance(caught.value.inner_exception, CannotRecord)
