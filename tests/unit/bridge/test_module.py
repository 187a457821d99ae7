"""A flax model in torch's hands."""

import copy

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import UserError, nn
from tests.contract.tasks import tiny
from torch_bridge.datasets import to_torch
from torch_bridge.module import FlaxAsTorch


class Norms(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nn.Linear(3, 4, rngs=rngs)
        self.batch_norm = nn.BatchNorm(4)
        self.layer_norm = nn.LayerNorm(4)
        self.rms_norm = nn.RMSNorm(4)
        self.last = nn.Linear(4, 2, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nn.gelu(self.batch_norm(self.first(x), rngs=rngs))
        return self.last(self.rms_norm(x + self.layer_norm(x)))


class Attends(nnx.Module):
    def __init__(self, *, rngs):
        self.embedding = nn.Embedding(5, 4, rngs=rngs)
        self.attention = nn.MultiheadAttention(4, 2, rngs=rngs)
        self.tied = self.embedding

    def __call__(self, x, ids, scale=1.0, rngs=None):
        h = x + self.embedding(ids)
        return {"h": scale * self.attention(h, rngs=rngs), "extra": (ids + 1, h.sum())}


class Convolves(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nn.Conv2d(1, 2, 3, padding=1, rngs=rngs)
        self.norm = nn.GroupNorm(1, 2)

    def __call__(self, x, rngs=None):
        return self.norm(self.conv(x)).mean((2, 3))


class Drops(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nn.Linear(8, 8, rngs=rngs)

    def __call__(self, x, rngs=None):
        return nn.Dropout(0.5)(self.linear(x), rngs=rngs)


class PlainFlax(nnx.Module):
    """Flax's own layers, which know their mode."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape", "call"),
    [
        (Norms, (5, 3), lambda module, x: module(x)),
        (Attends, (2, 3, 4), lambda module, x: module(x, IDS)["h"]),
        (Convolves, (2, 1, 4, 4), lambda module, x: module(x)),
    ],
)
def test_gradients_pass_gradcheck_in_float64(kind, shape, call, training):
    torch.manual_seed(0)
    module = FlaxAsTorch(kind(rngs=nnx.Rngs(0))).double().train(training)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: call(module, x), (x, *module.parameters()))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_torch_loop_fine_tunes_it_as_the_torch_twin(name, tmp_path):
    trainer = tiny("digits.classify", tmp_path, "model.dropout=0", "data.batch_size=16", "data.placement=host")
    twin = trainer.task.twin.build(trainer.config)
    module = FlaxAsTorch(trainer.model())
    twin.load_state_dict(module.state_dict(), strict=True)
    losses = []
    for network in (module, twin):
        optimizer = getattr(torch.optim, name)(network.parameters(), lr=1e-3)
        values = []
        for step in range(10):
            batch = jax.tree.map(to_torch, trainer.train_loader.host_batch(step))
            loss = torch.nn.functional.cross_entropy(network(batch["image"]), batch["label"].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        losses.append(values)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    module.load_state_dict(twin.state_dict(), strict=True)


def test_keys_and_their_order_are_the_twins(tmp_path):
    trainer = tiny("digits.classify", tmp_path)
    twin, module = trainer.task.twin.build(trainer.config), FlaxAsTorch(trainer.model())
    assert list(module.state_dict()) == list(twin.state_dict())
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in twin.named_parameters()]
    assert list(trainer.state_dict()) == list(twin.state_dict())


def test_running_statistics_move_in_training_only_and_as_torchs():
    module, theirs = FlaxAsTorch(Norms(rngs=nnx.Rngs(0))), torch.nn.BatchNorm1d(4)
    x = torch.randn(6, 3)
    for _ in range(2):
        module(x)
        theirs(_first(module, x))
    norm = module.batch_norm
    torch.testing.assert_close(norm.running_mean, theirs.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var, theirs.running_var, rtol=1e-5, atol=1e-6)
    assert int(norm.num_batches_tracked) == 2
    module.eval()
    module(x)
    assert int(norm.num_batches_tracked) == 2


def _first(module, x):
    return torch.nn.functional.linear(x, module.first.weight, module.first.bias).detach()


def test_tied_weights_are_one_parameter():
    module = FlaxAsTorch(Attends(rngs=nnx.Rngs(0)))
    assert module.embedding.weight is module.tied.weight
    assert sum(name.endswith("weight") for name, _ in module.named_parameters()) == 3


def test_outputs_keep_their_nesting_and_integers_are_64_bit():
    module = FlaxAsTorch(Attends(rngs=nnx.Rngs(0)))
    x = torch.randn(2, 3, 4)
    outputs = module(x, IDS, scale=2.0)
    assert outputs["extra"][0].dtype == torch.int64
    assert torch.equal(outputs["extra"][0], IDS + 1)
    torch.testing.assert_close(outputs["h"], 2 * module(x, ids=IDS)["h"])


def test_integers_that_32_bits_cannot_hold_are_refused():
    with pytest.raises(UserError, match=r"values from 0 to 8589934592, and JAX computes with 32-bit integers"):
        FlaxAsTorch(Attends(rngs=nnx.Rngs(0)))(torch.randn(1, 2, 4), ids=torch.tensor([[0, 2**33]]))


def test_dropout_follows_torchs_seed_and_mode():
    module, x = FlaxAsTorch(Drops(rngs=nnx.Rngs(0))), torch.ones(4, 8)
    torch.manual_seed(1)
    first, second = module(x), module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(x), module(x))


def test_flaxs_own_layers_change_their_mode():
    module, x = FlaxAsTorch(PlainFlax(rngs=nnx.Rngs(0))), torch.randn(6, 3)
    assert not torch.equal(module(x), module(x))
    assert module.state_dict()["norm.mean"].abs().sum() > 0
    module.eval()
    assert torch.equal(module(x), module(x))


def test_a_tensor_changed_before_backward_is_an_error_not_a_wrong_gradient():
    module, x = FlaxAsTorch(Norms(rngs=nnx.Rngs(0))), torch.randn(5, 3)
    loss = module(x).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_outputs_may_be_written_to():
    module, x = FlaxAsTorch(Norms(rngs=nnx.Rngs(0))), torch.randn(5, 3)
    module(x).sum().backward()
    expected = module.first.weight.grad.clone()
    module.zero_grad()
    module.batch_norm.running_mean.zero_()
    module(x).add_(1).sum().backward()
    torch.testing.assert_close(module.first.weight.grad, expected)


def test_frozen_parameters_get_no_gradient_and_copies_are_apart():
    module = FlaxAsTorch(Norms(rngs=nnx.Rngs(0)))
    module.first.requires_grad_(False)
    twin = copy.deepcopy(module)
    module(torch.randn(5, 3)).sum().backward()
    assert module.first.weight.grad is None
    assert module.last.weight.grad is not None
    with torch.no_grad():
        twin.last.weight.zero_()
    assert module.last.weight.abs().sum() > 0


def test_the_flax_model_comes_back_with_the_weights_of_now():
    module = FlaxAsTorch(Norms(rngs=nnx.Rngs(0)))
    with torch.no_grad():
        module.last.bias.fill_(3.0)
    np.testing.assert_array_equal(module.flax_model().last.bias[...], [3.0, 3.0])


def test_an_argument_of_no_use_is_named():
    module = FlaxAsTorch(Attends(rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="an argument is set, wanted a tensor"):
        module(torch.randn(2, 3, 4), IDS, scale={1.0})
