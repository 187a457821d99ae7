"""A loop whose batches are objects of the user's own classes is compiled, and trains as torch does."""

import dataclasses
import logging
import weakref

import pytest
import torch
from torch.nn import functional

import jaxtrain
from jaxtrain.accelerate import Accelerator
from tests.e2e.loops import torch_step


class Tokens:
    """As the Annotated Transformer's Batch: masks and shifted targets beside what they are made of."""

    def __init__(self, source, target):
        self.source, self.mask = source, (source != 0).unsqueeze(-1)
        self.target, self.wanted = target[:, :-1], target[:, 1:]
        self.count, self.name = (self.wanted != 0).sum(), "train"


class Nested:
    """As DETR's NestedTensor."""

    __slots__ = ("mask", "tensors")

    def __init__(self, tensors, mask):
        self.tensors, self.mask = tensors, mask

    def decompose(self):
        return self.tensors, self.mask


@dataclasses.dataclass(frozen=True)
class Record:
    image: Nested
    label: torch.Tensor
    where: torch.device = torch.device("cpu")
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", self.label * 2)


class Owner:
    """Holds a part that knows its owner, weakly and not."""

    def __init__(self, x):
        self.part = Part(self, x)


class Part:
    def __init__(self, owner, x):
        self.weak, self.owner, self.x = weakref.ref(owner), owner, x


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9)

    def forward(self, batch):
        source = (self.embedding(batch.source) * batch.mask).mean(1, keepdim=True)
        return self.head(self.embedding(batch.target) + source)


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        tensors, mask = x.decompose()
        return self.linear(tensors * mask[..., None])


def _tokens(draw):
    ids = lambda length: torch.randint(0, 9, (4, length), generator=draw)
    return Tokens(ids(6), ids(5))


def _tokens_loss(module, batch):
    return functional.cross_entropy(module(batch).flatten(0, 1), batch.wanted.flatten(), reduction="sum") / batch.count


def _nested(draw):
    return Nested(torch.randn(4, 3, generator=draw), torch.rand(4, generator=draw) > 0.3)


def _record_loss(module, batch):
    assert batch["rows"][0].where.type == "cpu"
    return functional.mse_loss(module(batch["rows"][0].image), batch["rows"][0].doubled)


def _owner_loss(module, batch):
    assert batch.part.weak() is batch
    assert batch.part.owner is batch
    return module(batch.part.weak().part.x).pow(2).mean()


CASES = {
    "attributes": (Encoder, _tokens, _tokens_loss),
    "slots in a tuple": (
        Masked,
        lambda draw: (_nested(draw), torch.randn(4, 2, generator=draw)),
        lambda module, batch: functional.mse_loss(module(batch[0]), batch[1]),
    ),
    "a frozen dataclass in a list in a dict": (
        Masked,
        lambda draw: {"rows": [Record(_nested(draw), torch.randn(4, 2, generator=draw))]},
        _record_loss,
    ),
    "a cycle": (lambda: torch.nn.Linear(3, 2), lambda draw: Owner(torch.randn(4, 3, generator=draw)), _owner_loss),
}


def _run(case, compiled: bool):
    build, sample, loss_fn = CASES[case]
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    module = build()
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    step = (jaxtrain.compile if compiled else torch_step)(module, optimizer=optimizer, loss_fn=loss_fn)
    for _ in range(6):
        step(sample(draw))
    if compiled:
        assert step.torch is None, "torch runs the steps"
        step.sync()
    return module


@pytest.mark.parametrize("case", CASES)
def test_steps_on_objects_are_one_program_and_end_with_torchs_weights(case):
    wanted, found = (dict(_run(case, compiled).state_dict()) for compiled in (False, True))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("branches", [False, True])
def test_a_loss_that_makes_tensors_of_a_batch_of_arrays_gets_them(branches):
    """In one program, and run by torch."""
    module = torch.nn.Linear(3, 1)

    def loss_fn(m, rows):
        y = m(torch.from_numpy(rows))
        return y.pow(2).mean() if not branches or float(y.detach().max()) < 1e9 else y.sum()

    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), 0.1))
    rows = torch.ones(4, 3)
    for _ in range(2):
        with torch.no_grad():
            wanted = module(rows).pow(2).mean().item()
        assert float(step(rows.numpy())) == pytest.approx(wanted, rel=1e-5)
    assert (step.torch is not None) == branches


def test_a_compiled_forward_takes_objects():
    """In evaluation, and prepared by accelerate, one output of four within 1e-6 of torch's."""
    torch.manual_seed(0)
    module, batch = Masked(), _nested(torch.Generator().manual_seed(1))
    wanted = module(batch)
    step = jaxtrain.compile(module, lambda m, b: m(b).sum(), torch.optim.SGD(module.parameters(), 0.1))
    torch.testing.assert_close(step.eval()(batch), wanted, rtol=0, atol=1e-6)
    prepared = Accelerator(cpu=True).prepare(module)
    found = prepared(batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    found.sum().backward()
    assert module.linear.bias.grad.tolist() == [4.0, 4.0]


def test_a_forward_that_changes_its_object_changes_it_as_in_torch():
    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x):
            x.seen = self.linear(x.tensors)
            return x.seen

    class Open:
        def __init__(self, tensors):
            self.tensors = tensors

    module, batch = Accelerator(cpu=True).prepare(Writes()), Open(torch.ones(2, 3))
    for _ in range(2):
        assert module(batch) is batch.seen


class Doubled(torch.Tensor):
    def mean(self):
        return super().mean() * 2


@pytest.mark.parametrize("accelerate", [False, True])
def test_methods_of_an_own_tensor_class_are_called(accelerate, caplog):
    caplog.set_level(logging.INFO, "torch_bridge")
    torch.manual_seed(0)
    ours, batch = torch.nn.Linear(4, 3), torch.randn(8, 4).as_subclass(Doubled)
    loss = lambda module, batch: module(batch + batch.mean()).square().mean()
    expected = loss(ours, batch).item()
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    if accelerate:
        found = loss(Accelerator(cpu=True).prepare(ours), batch).item()
    else:
        found = jaxtrain.compile(ours, loss, optimizer)(batch).item()
    assert found == pytest.approx(expected, rel=1e-6)
    assert "Doubled, a tensor class with methods of its own" in caplog.text


def test_a_loop_of_ever_new_shapes_goes_on_in_torch(caplog):
    """The eighth shape is told; where 64 batches have 64 shapes, torch runs the rest, to the same weights."""
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(module.parameters(), 0.01)
        loss_fn = lambda m, rows: m(rows).pow(2).mean()
        step = (jaxtrain.compile if compiled else torch_step)(module, optimizer=optimizer, loss_fn=loss_fn)
        draw = torch.Generator().manual_seed(1)
        for rows in range(1, 70):
            step(torch.randn(rows, 3, generator=draw))
        if compiled:
            assert step.torch is not None
            step.sync()
        ends.append(module.weight.detach().clone())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)
    assert caplog.text.count("have come in 8 shapes") == 1
    assert "torch runs the steps from here on" in caplog.text
