"""Functions of modules and batches under torch.compile(backend="jaxtrain"), with gradients by torch's autograd."""

import collections
import copy
import dataclasses
import logging

import pytest
import torch
from torch import nn

from torch_bridge.capture import compiled_graph
from torch_bridge.capture.module_call import compile_calls
from torch_bridge.torchvision_operators import declare_torchvision


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)
        self.slow = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.slow(x)
        return {"y": self.last(torch.relu(self.norm(self.first(x)))), "wanted": wanted}


def loss_of(net, batch):
    out = net(batch["x"])
    per_row = (out["y"] - out["wanted"] - batch["y"]).square().mean(1)
    return per_row.mean(), {"rows": per_row, "seen": per_row.mean().detach(), "count": 5, "none": None}


def pair():
    torch.manual_seed(0)
    net = Net()
    batch = {"x": torch.randn(6, 3, requires_grad=True), "y": torch.randn(6, 2)}
    return net, copy.deepcopy(net), batch, {key: value.detach().clone() for key, value in batch.items()}


def compiled(function):
    return torch.compile(function, backend="jaxtrain")


def test_a_training_step_equals_torchs_even_where_the_user_changes_the_loss():
    net, twin, batch, other = pair()
    other["x"].requires_grad_()
    for ours, given, run in ((net, batch, compiled(loss_of)), (twin, other, loss_of)):
        loss, parts = run(ours, given)
        with torch.no_grad():
            ours.slow.weight.mul_(0.9)  # as a moving average between forward and backward
        (2 * loss + parts["rows"][1] + ours.first.weight.square().sum()).backward()
        assert (parts["seen"].requires_grad, parts["rows"].requires_grad) == (False, True)
        assert (parts["count"], parts["none"]) == (5, None)
    torch.testing.assert_close(batch["x"].grad, other["x"].grad)
    for (name, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert net.unused.weight.grad is net.slow.weight.grad is None
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var)
    assert net.norm.num_batches_tracked == 1


def test_modes_and_frozen_parameters_count_as_they_are_at_the_call():
    net, twin, batch, other = pair()
    call = compiled(loss_of)
    call(net, batch)
    loss_of(twin, other)
    for model in (net, twin):
        model.eval()
        model.first.requires_grad_(False)
    torch.testing.assert_close(call(net, batch)[0], loss_of(twin, other)[0])
    call(net, batch)[0].backward()
    assert net.first.weight.grad is None
    assert net.last.weight.grad is not None


def test_a_complex_output_carries_its_gradient():
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    weights = torch.randn(3, 4, dtype=torch.complex64)
    call = compiled(lambda x: torch.fft.fft(layer(x)))
    (got,) = torch.autograd.grad((call(x) * weights).abs().sum(), x)
    (wanted,) = torch.autograd.grad((torch.fft.fft(layer(x)) * weights).abs().sum(), x)
    torch.testing.assert_close(got, wanted)


def test_a_complex_parameter_and_input_get_torchs_gradients():
    layer = nn.Linear(4, 2, dtype=torch.complex64)
    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    call = compiled(lambda x: layer(x).tanh().abs().sum())
    got = torch.autograd.grad(call(x), (x, layer.weight))
    wanted = torch.autograd.grad(layer(x).tanh().abs().sum(), (x, layer.weight))
    torch.testing.assert_close(got, wanted)


def test_a_call_without_random_numbers_takes_none_of_torchs():
    call = compiled(nn.Linear(3, 2))
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    for _ in range(2):
        call(torch.ones(1, 3))
    assert torch.equal(torch.rand(4), wanted)


def test_a_65th_size_runs_in_torch_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(compiled_graph, "MOST_PROGRAMS", 2)
    module = nn.Linear(3, 2)
    compile_calls([module])
    with caplog.at_level(logging.WARNING, "torch_bridge"):
        for rows in (2, 3, 4, 5, 6, 5):
            module(torch.ones(rows, 3)).sum().backward()
    assert module.weight.grad.sum() == 2 * 3 * 25
    assert "it has come in 2 sizes, each of which is compiled: pad to a few lengths" in caplog.text


@dataclasses.dataclass
class Parts:
    hidden: torch.Tensor
    text: str = "a"
    aux: torch.Tensor | None = None

    def __post_init__(self):
        self.hidden = self.hidden * 2


Pair = collections.namedtuple("Pair", "left right")


class InClasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        h = self.layer(x)
        return collections.OrderedDict(parts=Parts(h), pair=Pair(h, [Parts(h)]), none=None)


def test_outputs_keep_their_classes():
    net, x = InClasses(), torch.randn(4, 3)
    wanted = net(x)
    compile_calls([net])
    got = net(x)
    assert type(got) is collections.OrderedDict
    assert type(got["pair"]) is Pair
    assert got["none"] is None
    for mine, theirs in ((got["parts"], wanted["parts"]), (got["pair"].right[0], wanted["pair"].right[0])):
        assert type(mine) is Parts
        assert mine.aux is None
        assert mine.text == "a"
        assert torch.allclose(mine.hidden, theirs.hidden, atol=1e-6)


def test_a_decoder_trains_compiled_and_generates_in_torch():
    declare_torchvision()
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=None)
    net = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 20, (2, 5))
    wanted = net(input_ids=ids, labels=ids)
    text = net.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    compile_calls([net])
    got = net(input_ids=ids, labels=ids)
    assert type(got) is type(wanted)
    assert list(got) == list(wanted)
    assert torch.allclose(got.loss, wanted.loss, atol=1e-6)
    assert torch.allclose(got.logits, wanted.logits, atol=1e-5)
    assert torch.equal(net.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0), text)


@pytest.mark.parametrize("selected", [0, 3, 6])
def test_a_sum_over_selected_rows_is_divided_by_their_number(selected):
    layer = nn.Linear(3, 2)
    batch = {"x": torch.randn(6, 3), "mask": torch.arange(6) < selected}
    loss = lambda batch: layer(batch["x"])[batch["mask"]].square().sum() / (batch["mask"].sum().item() + 1e-6)
    call = compiled(loss)
    call(batch | {"mask": torch.arange(6) < 2})
    assert call(batch).item() == pytest.approx(loss(batch).item(), rel=1e-5)
