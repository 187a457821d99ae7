"""`from jaxtrain.accelerate import Accelerator`: accelerate's own loop, curves and files, the model compiled."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import UserError

accelerate = pytest.importorskip("accelerate")

import jaxtrain.accelerate as ours  # noqa: E402
from torch_bridge.capture.compiled_graph import CompiledGraph  # noqa: E402

pytestmark = pytest.mark.slow

ENGINES = {"accelerate": accelerate.Accelerator, "jaxtrain": ours.Accelerator}
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(50, 6, generator=DRAW), torch.randint(0, 3, (50,), generator=DRAW)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def train(engine: str, folder, precision: str = "no", go_on: bool = False) -> tuple[list[float], nn.Module]:
    """Run a loop as accelerate's complete example: accumulation, clipping, schedule, evaluation, state."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = ENGINES[engine](cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if go_on:
        accelerator.load_state(str(folder))
    seen = []
    for _ in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, labels=y)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(loss.item())
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics((model(x)["logits"].argmax(1), y)) for x, y in loader]
        seen.append(sum(float((guess == label).sum()) for guess, label in found))
    accelerator.save_state(str(folder))
    return seen, accelerator.unwrap_model(model)


def assert_same(theirs, mine, atol: float = 1e-5) -> None:
    for (key, want), got in zip(theirs.state_dict().items(), mine.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def test_curves_weights_and_metrics_are_accelerates(tmp_path):
    (want, theirs), (got, mine) = train("accelerate", tmp_path / "a"), train("jaxtrain", tmp_path / "b")
    assert got == pytest.approx(want, rel=1e-4)
    assert_same(theirs, mine)
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))


@pytest.mark.parametrize(("first", "second"), [("accelerate", "jaxtrain"), ("jaxtrain", "accelerate")])
def test_each_side_goes_on_from_the_others_state(tmp_path, first, second):
    train("accelerate", tmp_path / "whole")
    want, theirs = train("accelerate", tmp_path / "whole", go_on=True)
    train(first, tmp_path / "half")
    got, mine = train(second, tmp_path / "half", go_on=True)
    assert got == pytest.approx(want, rel=1e-4)
    assert_same(theirs, mine)


def test_bf16_is_accelerates_within_its_rounding(tmp_path):
    (want, _), (got, _) = train("accelerate", tmp_path / "a", "bf16"), train("jaxtrain", tmp_path / "b", "bf16")
    assert got == pytest.approx(want, rel=2e-2, abs=1.0)


def test_a_prepared_model_can_be_copied_and_pickled(tmp_path):
    _, model = train("jaxtrain", tmp_path)
    torch.save(copy.deepcopy(model), tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False).eval()
    torch.testing.assert_close(again(X)["logits"], Net.forward(model.eval(), X)["logits"])


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that XLA computes, one entry a call."""
    called, run = [], CompiledGraph.__call__
    monkeypatch.setattr(CompiledGraph, "__call__", lambda self, arguments: called.append(self) or run(self, arguments))
    return called


class Branches(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def test_a_forward_that_branches_on_values_runs_in_pieces(graphs):
    model = fresh("jaxtrain").prepare(Branches(nn.Linear(6, 6)))
    assert torch.equal(model(-X.abs()), -X.abs())
    torch.testing.assert_close(model(X.abs()), F.linear(X.abs(), model[0].weight, model[0].bias))
    assert graphs


def test_a_gradient_penalty_is_accelerates():
    found = {}
    for name, kind in ENGINES.items():
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator, model = kind(cpu=True), Net().eval()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            x = X.clone().requires_grad_()
            logits = model(x)["logits"]
            (slope,) = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
            accelerator.backward(F.cross_entropy(logits, Y) + slope.pow(2).sum(1).mean())
            optimizer.step()
            optimizer.zero_grad()
        found[name] = model
    assert_same(found["accelerate"], found["jaxtrain"])


def test_scaled_precisions_are_refused():
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises((UserError, ValueError), match="fp16"):
        ours.Accelerator(cpu=True, mixed_precision="fp16")


def test_another_compiler_is_refused():
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(UserError, match="dynamo_backend"):
        ours.Accelerator(cpu=True, dynamo_backend="inductor")


def fresh(engine: str, **options):
    accelerate.state.AcceleratorState._reset_state(True)
    return ENGINES[engine](cpu=True, **options)


def test_a_copy_of_a_model_in_bf16_has_weights_of_its_own():
    model = fresh("jaxtrain", mixed_precision="bf16").prepare(Net().eval())
    want = model(X)["logits"]
    again = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.zero_()
    torch.testing.assert_close(again(X)["logits"], want, rtol=2e-2, atol=1e-2)


def test_unwrap_model_without_autocast_gives_the_plain_forward():
    accelerator = fresh("jaxtrain", mixed_precision="bf16")
    model = accelerator.unwrap_model(accelerator.prepare(Net().eval()), keep_fp32_wrapper=False)
    torch.testing.assert_close(model(X)["logits"], Net().eval()(X)["logits"], rtol=1e-5, atol=1e-6)


def doubled(self, x, labels=None):
    return {"logits": Net.forward(self, x)["logits"] * 2}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_forward_that_is_set_on_the_model_is_the_one_that_runs(precision):
    found = {}
    for name in ENGINES:
        model = Net().eval()
        model.forward = doubled.__get__(model)
        found[name] = fresh(name, mixed_precision=precision).prepare(model)(X)["logits"]
    limit = 1e-5 if precision == "no" else 2e-2
    torch.testing.assert_close(found["jaxtrain"], found["accelerate"], rtol=limit, atol=limit)


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_a_model_compiled_by_torch_is_compiled_by_xla(how, graphs):
    model = Net().eval()
    want = model(X)["logits"].detach()
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    prepared = fresh("jaxtrain").prepare(model)
    torch.testing.assert_close(prepared(X)["logits"], want)
    assert len(graphs) == 1


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, state=None):
        out, state = self.body(x, state)
        return self.head(out[:, -1]), state


def test_a_recurrent_model_that_carries_its_state_is_compiled_whole(caplog):
    found = {}
    for name in ENGINES:
        accelerator, model, state = fresh(name), Recurrent(), None
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        for part in X.reshape(5, 2, 5, 6):
            logits, state = model(part, state)
            state = tuple(each.detach() for each in state)
            accelerator.backward(F.cross_entropy(logits, Y[:2]))
            optimizer.step()
            optimizer.zero_grad()
        found[name] = model
    assert_same(found["accelerate"], found["jaxtrain"])
    assert "in torch" not in caplog.text


class TakesPacked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.GRU(2, 5), nn.Linear(5, 3)

    def forward(self, packed):
        return self.head(self.body(packed)[1][-1])


def test_a_packed_sequence_as_an_input_is_computed_as_in_torch():
    packed = nn.utils.rnn.pack_sequence([torch.ones(length, 2) for length in (3, 1, 2)], enforce_sorted=False)
    made = TakesPacked()
    wanted = made(packed)
    prepared = fresh("jaxtrain").prepare(made)
    for _ in range(2):
        torch.testing.assert_close(prepared(packed), wanted, rtol=1e-5, atol=1e-6)
