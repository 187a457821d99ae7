"""torch.compile(backend="jaxtrain"): by name, with random numbers, from several threads, and what it prints."""

import importlib.metadata
import logging
import pathlib
import threading
import tomllib

import pytest
import torch
from torch import nn

from jaxtrain.errors import UserError
from tests.unit.capture.sides import draw
from torch_bridge.capture import artefacts, torch_api
from torch_bridge.capture.backend import jaxtrain

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _nothing_captured():
    torch_api.reset()


def test_torch_finds_the_backend_by_its_entry_point():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    entry = importlib.metadata.EntryPoint("jaxtrain", declared["jaxtrain"], "torch_dynamo_backends")
    assert entry.load() is jaxtrain


def test_the_same_seed_gives_the_same_dropout():
    module = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.3))
    compiled, x = torch.compile(module, backend=jaxtrain), draw(4, 6)
    torch.manual_seed(5)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(5)
    assert torch.equal(compiled(x), first)
    assert torch.equal(compiled(x), second)
    assert not torch.equal(first, second)
    kept = first != 0
    assert torch.allclose(first[kept], (module[0](x) / 0.7)[kept])
    assert abs(float(kept.float().mean()) - 0.7) < 0.1


def test_evaluation_draws_no_random_numbers():
    compiled = torch.compile(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3)).eval(), backend=jaxtrain)
    before = torch.get_rng_state()
    with torch.no_grad():
        compiled(draw(4, 6))
    assert torch.equal(torch.get_rng_state(), before)


def test_several_threads_train_modules_of_their_own():
    def make(number):
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(6, 8 + number), nn.Tanh(), nn.Linear(8 + number, 1))

    def train(module, run):
        found = []
        for step in range(4):
            loss = run(draw(4, 6, seed=step)).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            found.append(loss.item())
        return found

    wanted = [train(module, module) for module in map(make, range(3))]
    modules = [*map(make, range(3))]
    losses = [[] for _ in modules]

    def work(number):
        losses[number] = train(modules[number], torch.compile(modules[number], backend=jaxtrain))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, expected in zip(losses, wanted, strict=True):
        assert got == pytest.approx(expected, rel=1e-4)


def test_nothing_of_torch_or_python_is_exchanged():
    import builtins

    before = {name: vars(builtins)[name] for name in ("max", "min", "print", "open", "type", "id", "isinstance")}
    methods = {name: getattr(torch.Tensor, name) for name in ("item", "backward", "__add__")}
    torch.compile(nn.Linear(2, 2), backend=jaxtrain)(torch.ones(1, 2)).sum().backward()
    assert {name: vars(builtins)[name] for name in before} == before
    assert {name: getattr(torch.Tensor, name) for name in methods} == methods


def test_the_stages_are_printed_on_request(monkeypatch):
    lines = []
    monkeypatch.setattr(artefacts, "_chosen", frozenset({"graph", "jaxpr"}))
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    artefacts.log.addHandler(handler)
    monkeypatch.setattr(artefacts.log, "level", logging.INFO)
    try:
        torch.compile(nn.Linear(2, 3), backend=jaxtrain)(torch.ones(1, 2)).sum().backward()
    finally:
        artefacts.log.removeHandler(handler)
    text = "\n".join(lines)
    assert "[graph] forward" in text
    assert "torch.ops.aten.addmm.default" in text
    assert "[jaxpr] backward" in text
    assert "dot_general" in text


def test_an_unknown_stage_is_refused(monkeypatch):
    monkeypatch.setenv(artefacts.VARIABLE, "graph,jaxprs")
    monkeypatch.setattr(artefacts, "_chosen", None)
    with pytest.raises(UserError, match="JAXTRAIN_LOG=jaxprs: no such stage; wanted a list of guards, graph, jaxpr"):
        artefacts.chosen()
