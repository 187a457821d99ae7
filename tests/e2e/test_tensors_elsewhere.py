"""A loss that uses modules which were not given to `compile` ends with torch's numbers, in those modules too."""

import pytest
import torch

import jaxtrain
from tests.e2e.loops import torch_step


class Center(torch.nn.Module):
    """As DINO's loss: a center that follows the outputs. how: it is written in place, or assigned anew."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.register_buffer("center", torch.zeros(4))

    def forward(self, outputs):
        loss = ((outputs - self.center - 1) ** 2).mean()
        if self.how == "in place":
            self.center.mul_(0.9).add_(outputs.detach().mean(0) * 0.1)
        else:
            self.center = self.center * 0.9 + outputs.detach().mean(0) * 0.1
        return loss


class Head(torch.nn.Linear):
    """Its optimizer is stepped by the user."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, outputs):
        return (super().forward(outputs) - 1).pow(2).mean()


class Statistics(torch.nn.BatchNorm1d):
    def __init__(self):
        super().__init__(4, affine=False)

    def forward(self, outputs):
        return (super().forward(outputs) - 1).abs().pow(3).mean()


class Branch(torch.nn.Module):
    """A branch on values: torch runs its forward, around compiled parts."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        y = self.norm(self.linear(x))
        return y / 2 if float(y.detach().max()) > 100 else y


def _batches():
    return torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1))


def _run(build, build_loss, compiled: bool, between=None):
    torch.manual_seed(0)
    module, criterion = build(), build_loss()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    own = list(criterion.parameters())
    other = torch.optim.SGD(own, 0.1) if own else None
    loss_fn = lambda m, batch: criterion(m(batch))
    step = (jaxtrain.compile if compiled else torch_step)(module, optimizer=optimizer, loss_fn=loss_fn)
    losses = []
    for batch in _batches():
        losses.append(float(step(batch)))
        if other is not None:
            other.step()
            other.zero_grad()
        if between is not None:
            between(criterion)
    if compiled:
        step.sync()
    return torch.tensor(losses), module.state_dict(), criterion.state_dict()


CRITERIA = {
    "a buffer written in place": lambda: Center("in place"),
    "a buffer assigned anew": lambda: Center("assigned"),
    "a head with an optimizer of its own": Head,
    "BatchNorm": Statistics,
}


@pytest.mark.parametrize("case", CRITERIA)
def test_a_criterion_that_the_loss_closes_over_trains_as_in_torch(case):
    """Five losses, the weights and the criterion's tensors within 1e-5; before, recording ran it on them."""
    build = lambda: torch.nn.Linear(6, 4)
    wanted, found = (_run(build, CRITERIA[case], compiled) for compiled in (False, True))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_buffer_that_the_user_assigns_between_steps_counts_at_the_next():
    def between(criterion):
        criterion.center = criterion.center + 0.5

    class Fixed(Center):
        def forward(self, outputs):
            return ((outputs - self.center - 1) ** 2).mean()

    build = lambda: torch.nn.Linear(6, 4)
    wanted, found = (_run(build, lambda: Fixed(""), compiled, between) for compiled in (False, True))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_batchnorm_inside_a_forward_that_torch_runs_counts_every_batch_once():
    """momentum=None: 5 batches tracked, and their mean."""
    loss = lambda: torch.nn.CrossEntropyLoss()
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Branch()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        loss_fn = lambda m, batch: loss()(m(batch), torch.arange(8) % 4)
        step = (jaxtrain.compile if compiled else torch_step)(module, optimizer=optimizer, loss_fn=loss_fn)
        for batch in _batches():
            step(batch)
        if compiled:
            step.sync()
        runs.append(module.state_dict())
    assert int(runs[1]["norm.num_batches_tracked"]) == 5
    for name, value in runs[0].items():
        if name != "linear.bias":  # BatchNorm takes it away: its gradient is rounding
            torch.testing.assert_close(runs[1][name], value, rtol=1e-5, atol=1e-5)


def test_a_module_that_another_step_trains_is_read_with_its_newest_weights():
    """A generator's loss closes over the critic, whose step has moved its weights on the device."""
    trained = []
    for compiled in (False, True):
        torch.manual_seed(0)
        maker, critic = torch.nn.Linear(3, 6), torch.nn.Linear(6, 1)
        losses = lambda module, x, critic=critic: critic(module(x)).square().mean()
        pairs = [
            (critic, lambda module, x: module(x).exp().mean(), _batches()[0]),
            (maker, losses, _batches()[1, :, :3]),
        ]
        for module, loss_fn, batch in pairs:
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            step = jaxtrain.compile(module, loss_fn, optimizer) if compiled else torch_step(module, optimizer, loss_fn)
            step(batch)
        trained.append([*maker.parameters(), *critic.parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)
