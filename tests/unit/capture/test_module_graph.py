"""Modules that TorchDynamo captures for JAX to differentiate have torch's results, buffers and gradients."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import jaxtrain
from jaxtrain.runtime.prng import Rngs
from torch_bridge.from_torch import from_torch
from torch_bridge.state_dict import load_state_dict
from torch_bridge.training.torch_task import TorchTask


class Cut(nn.Module):
    """Gradients end in three ways, a buffer follows the data, and one slice of a tensor is written."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            teacher = self.second(hidden)
        filled = torch.zeros_like(hidden)
        filled[:, :3] = hidden[:, :3] * self.scale[:3]
        chosen = hidden.argmax(1, keepdim=True) * hidden
        return self.frozen(hidden) * hidden.detach() + teacher * self.second(x) + filled + self.average + chosen


def squared(output, batch):
    return (output - batch["y"]).pow(2).mean()


def test_gradients_end_where_torchs_do():
    torch.manual_seed(0)
    module, batch = Cut(), {name: np.random.default_rng(i).random((5, 6), np.float32) for i, name in enumerate("xy")}
    task = TorchTask(module, squared, batch, inputs=["x"], target="y")
    model = task.build()
    load_state_dict(model, {name: torch.from_numpy(np.array(value)) for name, value in task.weights().items()})
    loss = lambda model: task.loss(model, batch, lambda: jax.random.key(0))["value"]
    value, slopes = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param))(model)
    wanted = squared(module(torch.from_numpy(batch["x"])), {"y": torch.from_numpy(batch["y"])})
    wanted.backward()
    assert float(value) == pytest.approx(wanted.item(), rel=1e-6)
    ours = {".".join(map(str, path)): np.asarray(slope.get_value()) for path, slope in nnx.to_flat_state(slopes)}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            np.testing.assert_allclose(ours[name], parameter.grad, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(model.variables()["average"].get_value(), module.average, atol=1e-6)


def test_a_second_length_is_captured_once_for_all_lengths():
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    model = from_torch(module, torch.randn(2, 5, 8), ["evaluation"])
    for rows, length in ((2, 5), (7, 5), (7, 3), (3, 11), (4, 6)):
        x = torch.randn(rows, length, 8)
        np.testing.assert_allclose(model(x.numpy()), module(x).detach(), atol=1e-5)
    assert len(model._record.graphs()) == 2


def test_a_default_that_a_model_sets_once_is_no_obstacle():
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kind = nn.Linear(3, 3), None

        def forward(self, x):
            self.kind = self.kind or "linear"
            return self.linear(x) if self.kind == "linear" else x

    module = Sets()
    x = torch.randn(2, 3)
    np.testing.assert_allclose(from_torch(module, x)(x.numpy()), module.linear(x).detach(), atol=1e-6)
    assert module.kind is None


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, slope):
        return slope * 2


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return Doubles.apply(x * self.weight)


def test_code_with_a_part_in_its_backward_has_torchs_gradient():
    model = from_torch(Own(), torch.ones(2, 3))
    slopes = nnx.grad(lambda model: model(np.ones((2, 3), np.float32)).sum(), argnums=nnx.DiffState(0, nnx.Param))(
        model
    )
    np.testing.assert_allclose(slopes["weight"].get_value(), np.full(3, 4.0))


@pytest.mark.parametrize("windows", ["h.unfold(1, 2, 3)", "h.unfold(1, 2, 3)[0]", "h.unfold(1, 2, 3).transpose(0, 1)"])
def test_a_compiled_step_writes_through_windows_as_torch_does(windows):
    def loss(module, batch):
        h = module(batch) * 1.0
        eval(windows, {"h": h}).mul_(2.0)
        return h.pow(2).mean()

    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 6), nn.Linear(6, 6)
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = jaxtrain.compile(ours, loss, torch.optim.SGD(ours.parameters(), lr=0.1), wait=True)
    for _ in range(3):
        batch = torch.randn(4, 6)
        optimizer.zero_grad()
        wanted = loss(theirs, batch)
        wanted.backward()
        optimizer.step()
        assert float(step(batch)) == pytest.approx(wanted.item(), rel=1e-5)


class Dropped(nn.Module):
    """Dropout before a backward pass of its own, and once more in a checkpoint. The loss is linear in the last bias."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        hidden = Doubles.apply(self.drop(self.first(x)))
        return torch.utils.checkpoint.checkpoint(lambda h: self.drop(self.last(h)), hidden, use_reentrant=False)


def test_both_passes_draw_the_same_masks():
    model = from_torch(Dropped(), torch.ones(2, 4), ["training"])
    total = lambda model: model(np.ones((64, 4), np.float32), rngs=Rngs(jax.random.key(0))).sum()
    before, slopes = nnx.value_and_grad(total, argnums=nnx.DiffState(0, nnx.Param))(model)
    slope = np.asarray(slopes["last"]["bias"].get_value())
    for element in range(4):
        step = np.eye(4, dtype=np.float32)[element]
        model.last.bias.set_value(model.last.bias.get_value() + step)
        after = total(model)
        assert float(after - before) == pytest.approx(slope[element], abs=1e-3)
        before = after
