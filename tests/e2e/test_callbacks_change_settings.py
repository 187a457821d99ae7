"""What a callback changes on the user's torch objects, and the compiled run does not follow, is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from jaxtrain import Trainer, TrainingConfig, UserError

pytestmark = pytest.mark.slow

DRAW = torch.Generator().manual_seed(1)
DATA = torch.utils.data.TensorDataset(torch.randn(16, 6, generator=DRAW), torch.randint(0, 3, (16,), generator=DRAW))


class Scaled(nn.Module):
    """A loss with a weight of its own and a constant."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("weight", torch.ones(3))

    def forward(self, output, target):
        return F.cross_entropy(output * self.scale, target, weight=self.weight)


class Objects:
    """A module, its loss, optimizer and scheduler, and a callback that does `change` with them."""

    def __init__(self, change=None):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.module[0].bias.requires_grad_(False)
        self.loss, self.factor, self.change = Scaled(), 1.0, change
        parameters = [*self.module.parameters(), *self.loss.parameters()]
        self.optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        self.scheduler = LambdaLR(self.optimizer, lambda step: self.factor / (1 + step))

    def on_epoch_end(self, trainer, epoch):
        if self.change is not None:
            self.change(self)

    def trainer(self, folder, scheduled=True):
        config = TrainingConfig(
            run={"dir": str(folder), "quiet": True},
            data={"batch_size": 8, "shuffle": False},
            evaluation={"every_epochs": None},
            tracking={"tensorboard": False},
            train={"epochs": 2},
        )
        scheduler = self.scheduler if scheduled else None
        options = {"loss": self.loss, "optimizer": self.optimizer, "scheduler": scheduler, "callbacks": [self]}
        return Trainer(self.module, DATA, None, config, **options)


def hooked(o):
    o.module[0].register_forward_hook(lambda *_: None)


def momentum_of(o):
    return o.optimizer.state[o.module[0].weight]["momentum_buffer"]


REFUSED = {
    "thawed": (lambda o: o.module[0].bias.requires_grad_(True), "set requires_grad of 0.bias to True"),
    "frozen": (lambda o: o.loss.scale.requires_grad_(False), "set requires_grad of loss.scale to False"),
    "mode of a part": (lambda o: o.module[1].eval(), "left 1 in evaluation mode"),
    "mode": (lambda o: o.module.eval(), r"left the whole module in evaluation mode.*call train\(\)"),
    "hook": (hooked, "changed the forward or the hooks of 0,"),
    "hook of a weight": (lambda o: o.module[0].weight.register_hook(torch.neg), "the hooks of 0.weight"),
    "forward": (lambda o: setattr(o.module[2], "forward", torch.tanh), "changed the forward or the hooks of 2,"),
    "layer": (lambda o: o.module.__setitem__(2, nn.Tanh()), "replaced 2,"),
    "buffer": (lambda o: setattr(o.module[1], "running_mean", torch.zeros(8)), "replaced 1.running_mean"),
    "weight of the loss": (lambda o: o.loss.scale.data.clamp_(max=0.1), "changed loss.scale"),
    "constant of the loss": (lambda o: o.loss.weight.mul_(2), "changed loss.weight"),
    "rate": (
        lambda o: o.optimizer.param_groups[0].update(lr=0.01),
        "changed lr of the optimizer's group 0.*scheduler=",
    ),
    "option": (lambda o: o.optimizer.param_groups[0].update(nesterov=True), "changed nesterov"),
    "group": (lambda o: o.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "which parameters"),
    "moments": (lambda o: momentum_of(o).zero_(), "changed the state of the optimizer"),
    "cleared": (lambda o: o.optimizer.state.clear(), "changed the state of the optimizer"),
    "hook of step": (lambda o: o.optimizer.register_step_post_hook(print), r"hooks are registered on the step\(\)"),
    "attribute of the scheduler": (lambda o: o.scheduler.base_lrs.append(1.0), "changed the LambdaLR"),
    "what the scheduler reads": (lambda o: setattr(o, "factor", 0.5), "factor, which the LambdaLR reads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_changes_what_is_compiled_is_refused(tmp_path, name):
    change, words = REFUSED[name]
    with pytest.raises(UserError, match=rf"callback Objects.on_epoch_end .*{words}.*jaxtrain.compile"):
        Objects(change).trainer(tmp_path).train()


def looks(o):
    """Read everything, and put back what it sets."""
    o.module.eval()
    o.module.requires_grad_(False)
    with torch.no_grad():
        o.loss(o.module(DATA.tensors[0]), DATA.tensors[1])
    o.module.train()
    for name, parameter in o.module.named_parameters():
        parameter.requires_grad_(name != "0.bias")
    handle = o.module[0].register_forward_hook(lambda *_: None)
    handle.remove()
    o.optimizer.state_dict(), o.scheduler.state_dict(), o.optimizer.param_groups[0]["lr"]


def test_a_callback_that_puts_back_what_it_sets_may_go_on(tmp_path):
    Objects(looks).trainer(tmp_path).train()


def test_a_callback_reads_the_present_weights_of_the_loss(tmp_path):
    seen = []
    Objects(lambda o: seen.append(o.loss.scale.item())).trainer(tmp_path).train()
    assert len({1.0, *seen}) == 3


def test_a_callback_reads_the_present_moments_one_by_one(tmp_path):
    seen = []
    made = Objects(lambda o: seen.append(momentum_of(o).clone()))
    made.trainer(tmp_path).train()
    assert not torch.equal(seen[0], seen[1])
    torch.testing.assert_close(seen[1], momentum_of(made))


def test_the_trainers_own_writes_are_no_changes(tmp_path):
    class Writes(Objects):
        def on_epoch_end(self, trainer, epoch):
            trainer.write_back()

    Writes().trainer(tmp_path).train()


@pytest.mark.parametrize("change", [lambda o: o.module.eval(), lambda o: o.optimizer.state.clear()])
def test_a_run_may_begin_from_evaluation_mode_and_without_moments(tmp_path, change):
    made = Objects()
    trainer = made.trainer(tmp_path)
    change(made)
    trainer.train()


def test_a_rate_that_is_set_before_training_counts(tmp_path):
    moved = []
    for rate in (0.1, 0.0):
        made = Objects()
        trainer = made.trainer(tmp_path / str(rate), scheduled=False)
        made.optimizer.param_groups[0]["lr"] = rate
        before = made.module[0].weight.detach().clone()
        trainer.train()
        moved.append(not torch.equal(before, made.module[0].weight))
    assert moved == [True, False]


BETWEEN = {
    "thawed": (lambda o: o.module[0].bias.requires_grad_(True), "requires_grad of 0.bias", False),
    "mode of a part": (lambda o: o.module[1].eval(), "left 1 in evaluation mode", False),
    "decay begins": (lambda o: o.optimizer.param_groups[0].update(weight_decay=0.1), "weight_decay", False),
    "rate between runs": (lambda o: o.optimizer.param_groups[0].update(lr=0.01), "changed lr", True),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_changes_that_a_next_run_would_not_follow_are_refused(tmp_path, name):
    change, words, second = BETWEEN[name]
    made = Objects()
    trainer = made.trainer(tmp_path)
    if second:
        trainer.train()
    change(made)
    with pytest.raises(UserError, match=rf"{words}.*make a new Trainer"):
        trainer.train()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "torch.autocast is on .* set precision.policy to bf16 or fp16"),
        (torch.inference_mode, "torch.inference_mode is on .*: leave it out"),
    ],
)
def test_torchs_modes_around_a_run_are_refused(tmp_path, mode, words):
    trainer = Objects().trainer(tmp_path)
    with mode(), pytest.raises(UserError, match=words):
        trainer.train()
