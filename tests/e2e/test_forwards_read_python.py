"""What a forward reads from Python around it counts as it is at every call: globals, helpers, classes, hooks."""

import copy
import functools
import weakref

import pytest
import torch
from torch import nn
from torch.compiler import is_exporting

import jaxtrain
from tests.e2e.loops import assert_same, batches, check, mse, pair, torch_step

pytestmark = pytest.mark.slow

SCALE = 1.0
SETTINGS = {"scale": 1.0}
LOG: list = []


class Settings:
    scale = 1.0


HELD = Settings()
PROXY = weakref.proxy(HELD)


def scaled(x):
    return x * SCALE


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 1)

    def forward(self, x):
        return self.linear(x) * SCALE


class ByHelper(Net):
    def forward(self, x):
        return scaled(self.linear(x))


class ByMethod(Net):
    def forward(self, x):
        return self.scaled(self.linear(x))

    def scaled(self, x):
        return x * SETTINGS["scale"]


class ByClass(Net):
    def forward(self, x):
        return self.linear(x) * Settings.scale


class ByProxy(Net):
    def forward(self, x):
        return self.linear(x) * PROXY.scale


class Part(nn.Module):
    def forward(self, x):
        LOG.append(len(x))
        return x


class Logging(Net):
    """A part of it keeps something in a list of the file."""

    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.linear(self.part(x))


class Hooked(Net):
    """Its hook changes the gradient, and keeps something."""

    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda grad: (LOG.append(grad), 0.5 * grad)[1])
        return y


def loss(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def set_scale(value):
    global SCALE
    SCALE = SETTINGS["scale"] = Settings.scale = HELD.scale = value


def trained(module, make):
    """Five steps with a scale that changes; the lengths of the list that the module keeps."""
    LOG.clear()
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    step = make(module, optimizer)
    for number, batch in enumerate(batches(5)):
        set_scale(1 + number / 4)
        step(batch)
    if hasattr(step, "sync"):
        step.sync()
    set_scale(1.0)
    return len(LOG)


def in_torch(module, optimizer):
    def step(batch):
        optimizer.zero_grad()
        loss(module, batch).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("kind", [Net, ByHelper, ByMethod, ByClass, ByProxy, Logging, Hooked])
def test_weights_and_what_is_kept_are_torchs(kind):
    ours = kind()
    theirs = copy.deepcopy(ours)
    kept = trained(theirs, in_torch)
    assert trained(ours, lambda module, optimizer: jaxtrain.compile(module, loss, optimizer)) == kept
    assert_same(theirs, ours)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "weight"])
def test_a_hook_of_a_module_or_parameter_may_keep_something(register):
    def hook(*given):
        LOG.append(1)

    ours = Net()
    theirs = copy.deepcopy(ours)
    for module in (theirs, ours):
        add = module.linear.weight.register_hook if register == "weight" else module.linear.register_full_backward_hook
        add(hook)
    kept = trained(theirs, in_torch)
    assert trained(ours, lambda module, optimizer: jaxtrain.compile(module, loss, optimizer)) == kept == 5
    assert_same(theirs, ours)


def decorated(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs)

    return run


class Decorated(Net):
    @decorated
    def forward(self, x):
        return self.linear(x) * SCALE


def test_so_does_what_a_decorated_forward_reads():
    ours = Decorated()
    theirs = copy.deepcopy(ours)
    trained(theirs, in_torch)
    trained(ours, lambda module, optimizer: jaxtrain.compile(module, loss, optimizer))
    assert_same(theirs, ours)


class AskingForCompilers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 1)

    def forward(self, x):
        compiled = torch.compiler.is_compiling() or torch._dynamo.is_compiling() or is_exporting()
        return self.linear(x) * (2 if compiled else 1)


def test_a_forward_that_asks_for_a_compiler_is_told_of_none():
    check(*pair(AskingForCompilers))


class SkippingALook(AskingForCompilers):
    def forward(self, x):
        if not torch.compiler.is_compiling() and bool((x > 1e9).all()):
            return self.linear(x.clamp(max=1e9))
        return self.linear(x)


def test_a_forward_whose_branch_without_a_compiler_looks_at_values_takes_the_other(caplog):
    check(*pair(SkippingALook))
    assert "asks for a compiler and is told yes" in caplog.text


class AskingForTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 1)

    def forward(self, x):
        types = [type(x) is torch.Tensor, type(self.linear.weight) in (nn.Parameter,), type(len(x)) is int]
        return self.linear(x) * (1 + sum([*types, isinstance(x.shape[0], int), isinstance(len(x) / 2, float)]))


class KeyedBySizes(AskingForTypes):
    def forward(self, x):
        known = {"8": 3.0, "(5, 6)": 7.0}
        return self.linear(x) * known.get(f"{x.shape[0]}", 1.0) * known.get(str(tuple(x.shape)), 1.0)


def test_the_text_of_a_size_may_be_a_key():
    check(*pair(KeyedBySizes), data=[*batches(2), *batches(2, rows=5), *batches(2, rows=4)])


def test_a_forward_that_asks_for_types_is_told_those_of_torch():
    check(*pair(AskingForTypes), data=[*batches(2), *batches(2, rows=5), *batches(2, rows=4)])
    assert "type" not in globals()


class AskingForNumbers(nn.Module):
    """Scales by a Python number that changes at every step, and asks for its type. Other code is a factor of 100."""

    def __init__(self, ask):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.ask, self.scale = nn.Linear(6, 1), ask, 0.5

    def forward(self, x):
        return self.linear(x) * (1 + self.scale) * (1 if self.ask(self.scale) else 100)


ASKS = {
    "isinstance": lambda number: isinstance(number, float),
    "isinstance of several": lambda number: isinstance(number, (int, float)),
    "type": lambda number: type(number) is float,
    "no tensor": lambda number: not isinstance(number, torch.Tensor) and not torch.is_tensor(number),
    "computed from it": lambda number: isinstance(1 - number**2 / 3, float),
    "a tensor made of it": lambda number: torch.is_tensor(torch.full((2,), number)),
    "a tensor times it": lambda number: isinstance(torch.ones(2) * number, torch.Tensor),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_number_that_changes_has_its_type(ask):
    """Six losses and the weights as torch's; before, compiled steps took the other branch."""
    runs = []
    for ours in (False, True):
        module = AskingForNumbers(ASKS[ask])
        optimizer = torch.optim.SGD(module.parameters(), 1e-2)
        step = jaxtrain.compile(module, mse, optimizer) if ours else torch_step(module, optimizer)
        losses = []
        for number, batch in enumerate(batches(6)):
            module.scale = 0.5 + number / 10
            losses.append(float(step(batch)))
        assert not ours or step.torch is None
        runs.append((losses, module))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    step.sync()
    assert_same(runs[0][1], runs[1][1])
