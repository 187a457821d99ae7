"""Tensors that a loss or forward leaves in attributes, lists and dicts are there after a compiled step, as torch's."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

import jaxtrain
from jaxtrain.accelerate import Accelerator
from tests.e2e.loops import assert_same

STEPS = 5


class Net(nn.Module):
    """Leaves what `leaves(net, hidden)` sets. held: a list or dict of it."""

    def __init__(self, leaves=lambda net, hidden: None, held=None):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.leaves, self.held, self.aux = leaves, held, None

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        self.leaves(self, hidden)
        return self.head(hidden)


class Saver:
    """A hook that is an object."""

    def __init__(self):
        self.features = None

    def __call__(self, module, inputs, output):
        self.features = output


class Recurrent(Net):
    def forward(self, x):
        hidden = torch.tanh(self.inner(x) + (0 if self.aux is None else self.aux))
        self.aux = hidden.detach().mean(0)
        return self.head(hidden)


class Pruned(Net):
    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.inner, "weight", amount=0.4)


def _aux(net, hidden):
    net.aux = hidden.abs().mean()


def _kinds(net, hidden):
    net.aux = {"row": hidden.argmax(1), "on": hidden > 0, "wide": hidden.detach().double(), "pair": (hidden, hidden[0])}


def _append(net, hidden):
    net.held.append(hidden.mean())
    net.held.append(hidden)


def _refill(net, hidden):
    net.held.clear()
    _append(net, hidden)


def _item(net, hidden):
    net.held["hidden"] = hidden.detach()


def _hooked(hook):
    def build():
        net = Net()
        net.saver = hook(net)
        net.inner.register_forward_hook(net.saver)
        return net

    return build


def _get_activation(net):
    net.held = activation = {}

    def hook(module, inputs, output):
        activation["inner"] = output.detach()

    return hook


square = lambda net, batch: net(batch).square().mean()
balanced = lambda net, batch: square(net, batch) + 0.1 * net.aux
aux, held, features = lambda net: net.aux, lambda net: list(net.held), lambda net: net.saver.features
empty = lambda net, number: net.held.clear()


def anew(net, number):
    if number == 3:
        net.held = type(net.held)()


# build, loss, what is read after a step, what the loop does before one
COMPILED = {
    "an attribute that the loss adds": (lambda: Net(_aux), balanced, aux, None),
    "a list that the loop empties": (lambda: Net(_append, []), square, held, empty),
    "a list that the forward refills": (lambda: Net(_refill, []), square, held, anew),
    "an item of a dict": (lambda: Net(_item, {}), square, lambda net: net.held, anew),
    "a hook's closure": (_hooked(_get_activation), square, lambda net: net.held, None),
    "an object that is a hook": (
        _hooked(lambda net: Saver()), lambda net, b: square(net, b) + features(net).abs().mean(), features, None,
    ),
    "pruned weights": (Pruned, square, lambda net: net.inner.weight, None),
}  # fmt: skip
IN_TORCH = {
    "dtypes and containers": (lambda: Net(_kinds), square, aux, None),
    "a state that the next call reads": (Recurrent, square, aux, None),
    "a list that grows": (lambda: Net(_append, []), square, held, None),
}


def _run(case, engine):
    build, loss_fn, read, before = (COMPILED | IN_TORCH)[case]
    torch.manual_seed(0)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    step = jaxtrain.compile(net, loss_fn, optimizer) if engine == "compile" else None
    called = Accelerator(cpu=True).prepare(net) if engine == "accelerate" else net
    seen = []
    for number in range(STEPS):
        if before is not None:
            before(net, number)
        batch = torch.randn(4 + number % 2, 6, generator=torch.Generator().manual_seed(number))
        if step is not None:
            step(batch)
        else:
            optimizer.zero_grad()
            loss_fn(called, batch).backward()
            optimizer.step()
        seen.append(pytree.tree_map(lambda tensor: tensor.detach().clone(), read(net)))
    if step is not None:
        step.sync()
    return seen, net, step


@pytest.mark.parametrize("engine", ["compile", "accelerate"])
@pytest.mark.parametrize("case", [*COMPILED, *IN_TORCH])
def test_after_each_step_they_are_torchs(case, engine):
    wanted, theirs, _ = _run(case, "torch")
    seen, net, step = _run(case, engine)
    for ours, torchs in zip(seen, wanted, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
    assert_same(theirs, net)
    if step is not None:
        assert step.torch is None or case not in COMPILED


def test_a_tensor_of_a_step_stays_as_it_was():
    """As in torch each call leaves another tensor, which copies and reads as a plain one."""
    torch.manual_seed(0)
    net = Net(_item, {})
    step = jaxtrain.compile(net, square, torch.optim.SGD(net.parameters(), 0.5))
    step(torch.ones(2, 6))
    first = net.held["hidden"]
    value = first.clone()
    step(torch.ones(2, 6))
    assert torch.equal(first, value)
    assert not torch.equal(net.held["hidden"], value)
    assert isinstance(first, torch.Tensor)
    assert not first.requires_grad


def test_an_evaluation_leaves_them_too():
    torch.manual_seed(0)
    net, batch = Net(_aux), torch.ones(3, 6)
    step = jaxtrain.compile(net, balanced, torch.optim.SGD(net.parameters(), 0.5))
    evaluate = step.eval()
    for _ in range(2):
        step(batch)
        found, left = evaluate(batch), net.aux.item()
        torch.testing.assert_close(found, net(batch), rtol=0, atol=1e-6)
        assert left == pytest.approx(net.aux.item(), abs=1e-6)


def _pair(net, hidden):
    if isinstance(net.aux, list) and len(net.aux) > 2:
        hidden = 2 * hidden
    net.aux = [hidden.detach(), (hidden.mean(),)]


def test_a_list_left_anew_by_each_call_is_no_other_setting():
    """Calls share the second one's program until the loop changes the list."""
    torch.manual_seed(0)
    net, batch = Net(_pair), torch.ones(2, 6)
    step = jaxtrain.compile(net, square, torch.optim.SGD(net.parameters(), 0.5))
    for _ in range(4):
        step(batch)
    assert step.torch is None
    assert len(step.programs) <= 2


def _through_time(compiled):
    """Train with the hidden state and the loss of the step before as parts of the batch."""
    torch.manual_seed(0)
    cell, kept = nn.LSTMCell(3, 4), {}
    optimizer = torch.optim.SGD(cell.parameters(), 0.5)

    def loss_fn(module, batch):
        x, h, c, last = batch
        h, c = module(x, (h, c))
        kept["state"] = h.detach(), c.detach()
        return h.square().mean() + 0.1 * last * c.mean()

    step = jaxtrain.compile(cell, loss_fn, optimizer) if compiled else None
    state, loss = (torch.zeros(2, 4), torch.zeros(2, 4)), torch.ones(())
    for number in range(STEPS):
        batch = torch.randn(2, 3, generator=torch.Generator().manual_seed(number)), *state, loss.detach()
        if step is None:
            optimizer.zero_grad()
        loss = (step or partial(loss_fn, cell))(batch)
        if step is None:
            loss.backward()
            optimizer.step()
        state = kept["state"]
    return [tensor.clone() for tensor in (*state, *cell.parameters())], step


def test_what_a_step_gives_goes_into_the_next_batch():
    wanted, _ = _through_time(compiled=False)
    found, step = _through_time(compiled=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert step.torch is None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.shifts = nn.Linear(3, 2), torch.ones(2), [torch.zeros(2)]

    def forward(self, x):
        return self.linear(x) * self.scale + self.shifts[0]


@pytest.mark.parametrize("change", ["replaced", "in place", "an item"])
def test_an_evaluation_reads_the_newest_tensors_of_attributes(change):
    torch.manual_seed(0)
    net, batch = Scaled(), torch.ones(4, 3)
    evaluate = jaxtrain.compile(net, square, torch.optim.SGD(net.parameters(), 0.1)).eval()
    before = evaluate(batch)
    if change == "replaced":
        net.scale = torch.full((2,), 3.0)
    elif change == "in place":
        net.scale.mul_(3)
    else:
        net.shifts[0] = torch.ones(2)
    torch.testing.assert_close(evaluate(batch), net(batch), rtol=0, atol=1e-6)
    assert not torch.equal(evaluate(batch), before)


class Configured(Net):
    """As a model of transformers, which notes the kind of its problem at its first call."""

    def __init__(self):
        super().__init__()
        self.held = {"problem_type": None}

    def forward(self, x):
        if self.held["problem_type"] is None:
            self.held["problem_type"] = "regression"
        return super().forward(x)


@pytest.mark.parametrize("accelerate", [False, True])
def test_a_setting_of_the_first_call_is_set_and_that_call_compiled(accelerate, caplog):
    torch.manual_seed(0)
    net = Configured()
    batch, wanted = torch.ones(2, 6), square(net, torch.ones(2, 6)).item()
    net.held["problem_type"] = None
    if accelerate:
        found = square(Accelerator(cpu=True).prepare(net), batch)
    else:
        found = jaxtrain.compile(net, square, torch.optim.SGD(net.parameters(), 0.1))(batch)
    assert found.item() == pytest.approx(wanted, rel=1e-5)
    assert net.held == {"problem_type": "regression"}
    assert "in torch" not in caplog.text


@pytest.mark.parametrize("operation", ["product", "quotient", "function", "method"])
@pytest.mark.parametrize("place", ["attribute", "item", "variable"])
def test_a_loss_that_the_loop_keeps_counts_with_its_newest_value(place, operation):
    """The loop scales a step by the loss of the step before."""
    losses = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        net, kept, last = Net(), [None], None

        def loss_fn(module, batch, net=net, kept=kept):
            value = square(module, batch)
            scale = {"attribute": net.aux, "item": kept[0], "variable": last}[place]
            if scale is None:
                return value
            return {
                "product": lambda: value * scale,
                "quotient": lambda: 1 / scale * value,
                "function": lambda: torch.mul(value, scale),
                "method": lambda: value * scale.clamp(min=0.01),
            }[operation]()

        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        step = jaxtrain.compile(net, loss_fn, optimizer) if compiled else None
        losses[compiled] = []
        for number in range(4):
            batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
            if compiled:
                loss = step(batch)
            else:
                optimizer.zero_grad()
                loss = loss_fn(net, batch)
                loss.backward()
                optimizer.step()
                loss = loss.detach()
            losses[compiled].append(loss)
            net.aux = kept[0] = last = loss
    assert [float(loss) for loss in losses[True]] == pytest.approx([float(loss) for loss in losses[False]], rel=1e-4)
