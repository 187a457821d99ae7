"""Parameters that the loss does not reach stay as they are, and a loss that reaches none is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import UserError
from jaxtrain.accelerate import Accelerator
from tests.e2e.loops import assert_same, batches, mse, net


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.head(hidden), self.other(hidden)


def with_logged(module, batch):
    """A loss of the head, and one of the other head that is only logged."""
    x, y = batch
    output, other = module(x)
    return F.mse_loss(output, y), {"other": F.mse_loss(other, y)}


DATA = batches(6)


def decaying(module):
    return torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.5)


def in_torch(module) -> nn.Module:
    optimizer = decaying(module)
    for batch in DATA:
        with_logged(module, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def test_a_head_that_is_only_logged_does_not_decay():
    ours = TwoHeads()
    step = jaxtrain.compile(ours, with_logged, decaying(ours))
    for batch in DATA:
        step(batch)
    step.sync()
    assert_same(in_torch(TwoHeads()), ours)


def test_an_output_that_no_loss_uses_leaves_its_head_without_a_gradient():
    accelerator, ours = Accelerator(cpu=True), TwoHeads()
    prepared, optimizer = accelerator.prepare(ours, decaying(ours))
    for batch in DATA:
        accelerator.backward(with_logged(prepared, batch)[0])
        assert ours.other.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert_same(in_torch(TwoHeads()), ours)


def test_so_does_a_gradient_of_a_gradient():
    accelerator, ours = Accelerator(cpu=True), TwoHeads()
    prepared = accelerator.prepare(ours)
    x = DATA[0][0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(prepared(x)[0].sum(), x, create_graph=True)
    accelerator.backward(slope.pow(2).mean())
    assert ours.other.weight.grad is None
    assert ours.head.weight.grad.abs().sum() > 0


def detached(module, batch):
    return mse(module, batch).detach()


def a_number(module, batch):
    return mse(module, batch).item()


@pytest.mark.parametrize("loss", [detached, a_number])
def test_a_loss_without_a_gradient_is_refused_and_changes_no_weight(loss):
    module = net()
    before = copy.deepcopy(module.state_dict())
    step = jaxtrain.compile(module, loss, decaying(module))
    with pytest.raises(UserError, match=f"{loss.__name__}: no parameter that requires a gradient reaches the loss"):
        step(batches(1)[0])
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_so_is_one_of_frozen_parameters():
    module = net()
    optimizer = decaying(module)
    module.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        jaxtrain.compile(module, mse, optimizer)(batches(1)[0])


def test_a_batch_that_torch_refuses_raises_its_error_and_the_next_one_is_compiled(caplog):
    module = net()
    step = jaxtrain.compile(module, mse, decaying(module))
    x, y = batches(1)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step((x[:, :-1], y))
    step((x, y))
    assert step.torch is None
    assert not [record for record in caplog.records if record.name.startswith(("jaxtrain", "torch_bridge"))]


def in_trainer(folder, module=None, loss=None):
    data = torch.utils.data.TensorDataset(*DATA[0])
    config = jaxtrain.TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 8},
        train={"steps": 1},
        evaluation={"every_epochs": None},
    )
    jaxtrain.Trainer(module or net(), data, None, config, loss=loss or nn.MSELoss()).train()


def test_a_trainer_refuses_a_loss_without_a_gradient_and_frozen_modules(tmp_path):
    with pytest.raises(UserError, match="depends on no parameter that trains"):
        in_trainer(tmp_path / "detached", loss=lambda output, target: F.mse_loss(output, target).detach())
    with pytest.raises(UserError, match="depends on no parameter that trains"):
        in_trainer(tmp_path / "frozen", net().requires_grad_(False))


def test_a_trainer_says_which_loss_it_takes(tmp_path):
    with pytest.raises(UserError, match="loss: got the class MSELoss; pass an object of it"):
        in_trainer(tmp_path, loss=nn.MSELoss)
    with pytest.raises(UserError, match="loss: got an object of str, wanted a loss module or a function"):
        in_trainer(tmp_path, loss="mse")


@pytest.mark.parametrize(
    ("module", "loss", "options", "why"),
    [
        (net(), nn.MSELoss(), {}, "MSELoss compares an output with a target, and is called as .module, batch."),
        (net(), lambda batch: batch, {}, "called as .module, batch.: too many positional arguments"),
        (nn.Linear, mse, {}, "module: the class Linear, wanted a torch.nn.Module"),
        (net(), mse, {"clip_norm": "1"}, "clip_norm: '1', wanted a number above 0"),
    ],
    ids=["criterion", "one argument", "class", "clip_norm"],
)
def test_what_is_no_module_loss_or_limit_is_told_before_the_first_step(module, loss, options, why):
    with pytest.raises(UserError, match=why):
        jaxtrain.compile(module, loss, decaying(net()), **options)


def test_backward_of_a_steps_loss_says_that_it_has_run():
    module = net()
    with pytest.raises(UserError, match="has run backward and the optimizer already"):
        jaxtrain.compile(module, mse, decaying(module))(batches(1)[0]).backward()
