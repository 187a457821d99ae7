"""While XLA compiles a graph, torch computes it: halves of one call may come from either side."""

import copy
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain.runtime import background
from tests.compiling import child_environment
from tests.unit.capture.sides import assert_same, draw
from torch_bridge.capture import compiled_graph, torch_api
from torch_bridge.capture.backend import jaxtrain
from torch_bridge.capture.meanwhile import one_core_less


@pytest.fixture(params=["forward", "backward"])
def half_in_torch(request, monkeypatch):
    """Leave one half of each call to torch, as while XLA compiles it."""
    is_ready, seen = compiled_graph._Program.is_ready, []

    def ready(program, *arguments):
        seen.append(program._kind)
        return is_ready(program, *arguments) and program._kind != request.param

    monkeypatch.setattr(compiled_graph._Program, "is_ready", ready)
    yield
    assert {"forward", "backward"} <= set(seen)


class On(nn.Module):
    """A function of the input and of a weight."""

    def __init__(self, function, size):
        super().__init__()
        self.weight, self.function = nn.Parameter(draw(size, seed=3)), function

    def forward(self, x):
        return self.function(x * self.weight)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(6, 3, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


def ctc(x):
    lengths = torch.full((2,), 8), torch.full((2,), 3)
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2, 3], [2, 2, 1]]), *lengths)


def checked(x):
    return F.cross_entropy(x, torch.tensor([0, -100, 2, 5]), ignore_index=-100, label_smoothing=0.1)


CASES = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), (8, 6)),
    "batch norm in evaluation": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4).eval()), (8, 6)),
    "batch norm of images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 8, 8)),
    "instance norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)), (2, 3, 8, 8)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (2, 3, 8, 8)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()), (8, 6)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6), nn.SiLU()), (8, 6)),
    "max pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, padding=1)), (2, 3, 8, 8)),
    "max pool 1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.MaxPool1d(2)), (2, 3, 8)),
    "max pool 3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.MaxPool3d(2)), (2, 3, 6, 6, 6)),
    "adaptive max pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(2)), (2, 3, 8, 8)),
    "average pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2, padding=1)), (2, 3, 8, 8)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 6, 6)),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(4)), (8, 6)),
    "log sigmoid": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LogSigmoid()), (8, 6)),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LogSoftmax(-1), nn.Softmax(0)), (8, 6)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), (8, 6)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), (8, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), (2, 5, 6)),
    "attention with weights": (
        lambda: On(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), 6),
        (2, 5, 6),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 5, 6)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 5, 6)),
    "ctc": (lambda: On(ctc, 5), (8, 2, 5)),
    "cross entropy": (lambda: On(checked, 6), (4, 6)),
    "sorted": (lambda: On(lambda x: x.sort(-1).values.cumsum(-1), 6), (4, 6)),
    "top values": (lambda: On(lambda x: x.topk(2, -1).values, 6), (4, 6)),
    "median": (lambda: On(lambda x: x.median(-1).values, 6), (4, 6)),
    "maximum": (lambda: On(lambda x: x.max(-1).values * x.amin(0).sum(), 6), (4, 6)),
    "distances": (lambda: On(lambda x: torch.cdist(x, x + 1), 6), (4, 6)),
    "cumulative maximum": (lambda: On(lambda x: x.cummax(-1).values, 6), (4, 6)),
    "upsampled": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        (2, 3, 6, 6),
    ),
    "sampled on a grid": (
        lambda: On(lambda x: F.grid_sample(x[:, :2], x[:, 2:].movedim(1, -1).tanh(), align_corners=True), 6),
        (2, 4, 6, 6),
    ),
    "eigenvalues": (lambda: On(lambda x: torch.linalg.eigvalsh(x @ x.mT), 6), (4, 6)),
    "norms": (lambda: On(lambda x: x.norm(dim=-1) * F.normalize(x, dim=0).sum(), 6), (4, 6)),
    "products": (lambda: On(lambda x: x.prod(-1), 6), (4, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_either_half_of_a_call_may_run_in_torch(case, half_in_torch):
    make, shape = CASES[case]
    x = draw(*shape)
    torch._dynamo.config.allow_rnn, allowed = True, torch._dynamo.config.allow_rnn
    try:
        assert_same(make, lambda module, compiler, number: [compiler(module)(x + number).square().mean()])
    finally:
        torch._dynamo.config.allow_rnn = allowed


@pytest.fixture
def compiler(monkeypatch):
    """A gate before the compiler, and the sides that compute the graphs, one entry a call."""
    monkeypatch.setenv("JAXTRAIN_WAIT", "0")
    monkeypatch.setattr(background.compile_cache, "holds", lambda lowered: False)
    torch_api.reset()
    gate, sides = threading.Event(), []
    run, meanwhile, compute = (
        background.Compilation.run,
        compiled_graph.CompiledGraph._meanwhile,
        compiled_graph._Program.compute,
    )

    monkeypatch.setattr(background._Queue, "_into_cache", lambda *given: None)  # the thread compiles: no second JAX

    def gated(compilation):
        gate.wait()
        run(compilation)

    monkeypatch.setattr(background.Compilation, "run", gated)
    monkeypatch.setattr(
        compiled_graph.CompiledGraph, "_meanwhile", lambda *given: sides.append("torch") or meanwhile(*given)
    )
    monkeypatch.setattr(compiled_graph._Program, "compute", lambda *given: sides.append("XLA") or compute(*given))
    yield Compiler(gate, sides)
    gate.set()


class Compiler:
    def __init__(self, gate, sides):
        self.gate, self.sides = gate, sides

    def finish(self):
        self.gate.set()
        while background._queue._thread is not None:
            threading.Event().wait(0.01)


def training(module, x, options=None):
    """Yield the loss of each step, trained compiled, and that of a twin trained in eager torch."""
    twin = copy.deepcopy(module)
    pairs = [(torch.compile(module, backend=jaxtrain, options=options), module), (twin, twin)]
    optimizers = [torch.optim.AdamW(inner.parameters(), 1e-2) for _, inner in pairs]
    while True:
        losses = []
        for (call, _), optimizer in zip(pairs, optimizers, strict=True):
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        yield losses


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))


def test_losses_stay_torchs_over_the_switch(compiler):
    steps = training(net(), draw(8, 6))
    for _ in range(5):
        mine, theirs = next(steps)
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert compiler.sides == ["torch"] * 10
    compiler.finish()
    for _ in range(5):
        mine, theirs = next(steps)
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert compiler.sides[10:] == ["XLA"] * 10


def test_a_size_is_traced_once_torch_has_taken_as_long(compiler, monkeypatch):
    compiler.gate.set()
    monkeypatch.setattr(compiled_graph, "TRACE_S", 1e9)
    module, begun = torch.compile(net().eval(), backend=jaxtrain), []
    put = background._Queue.put
    monkeypatch.setattr(background._Queue, "put", lambda queue, given: begun.append(given) or put(queue, given))
    with torch.no_grad():
        for rows in (8, 5, 7, 5):
            torch.testing.assert_close(module(draw(rows, 6)), net().eval()(draw(rows, 6)))
    assert len(begun) == 1  # the first size's
    assert compiler.sides == ["torch"] * 4


def test_a_new_shape_runs_in_torch_until_its_program_is_there(compiler, monkeypatch):
    monkeypatch.setattr(compiled_graph, "TRACE_S", 0.0)
    module = torch.compile(net().eval(), backend=jaxtrain)
    with torch.no_grad():
        for rows in (8, 5):  # the second size makes sizes symbolic: a graph of its own
            module(draw(rows, 6))
        compiler.finish()
        del compiler.sides[:]
        compiler.gate.clear()
        for rows in (5, 7, 5):
            torch.testing.assert_close(module(draw(rows, 6)), net().eval()(draw(rows, 6)))
        assert compiler.sides == ["XLA", "torch", "XLA"]
        compiler.finish()
        torch.testing.assert_close(module(draw(7, 6)), net().eval()(draw(7, 6)))
        assert compiler.sides[-1] == "XLA"


def test_one_line_tells_of_the_switch(compiler, caplog, monkeypatch):
    monkeypatch.setattr(background, "_queue", background._Queue())
    steps = training(net(), draw(8, 6))
    next(steps)
    compiler.finish()
    for _ in range(3):
        next(steps)
    assert len([text for text in caplog.messages if "XLA has compiled 2 programs" in text]) == 1


def test_the_generator_goes_on_alike_on_both_sides(compiler):
    module = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), backend=jaxtrain)
    after = []
    for _ in range(2):  # in torch, then by XLA
        torch.manual_seed(1)
        shown = module(torch.ones(64, 6))
        assert 0.3 < float((shown == 0).float().mean()) < 0.7
        after.append(torch.get_rng_state())
        compiler.finish()
    assert compiler.sides == ["torch", "XLA"]
    assert torch.equal(*after)


@pytest.mark.parametrize("asked", ["option", "environment", "deterministic"])
def test_who_asks_for_the_same_bits_waits(compiler, asked, monkeypatch):
    compiler.gate.set()
    if asked == "environment":
        monkeypatch.setenv("JAXTRAIN_WAIT", "1")
    torch.use_deterministic_algorithms(asked == "deterministic")
    try:
        next(training(net(), draw(8, 6), {"wait": True} if asked == "option" else None))
    finally:
        torch.use_deterministic_algorithms(False)
    assert compiler.sides == ["XLA", "XLA"]


def test_a_program_of_the_cache_is_taken_at_once(compiler, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("JAXTRAIN_WAIT", "0")
    with torch.no_grad():
        x, module = draw(3, 6), net().eval()
        torch.compile(module, backend=jaxtrain)(x)
        compiler.finish()
        torch_api.reset()
        monkeypatch.setattr(background._Queue, "put", lambda *given: pytest.fail("it is compiled again"))
        torch.compile(module, backend=jaxtrain)(x)


def test_an_error_of_the_compiler_reaches_the_caller(compiler, monkeypatch):
    def broken(compilation):
        compilation._error = MemoryError("no room")
        compilation._over.set()

    monkeypatch.setattr(background.Compilation, "run", broken)
    module = torch.compile(net().eval(), backend=jaxtrain)
    with torch.no_grad():
        module(draw(8, 6))
        compiler.finish()
        with pytest.raises(MemoryError, match="no room"):
            module(draw(8, 6))


def test_what_xla_cannot_compile_stays_in_torch(compiler, monkeypatch, caplog):
    import jax

    def broken(compilation):
        compilation._error = jax.errors.JaxRuntimeError("INTERNAL: no such instruction")
        compilation._over.set()

    monkeypatch.setattr(background.Compilation, "run", broken)
    module = torch.compile(net().eval(), backend=jaxtrain)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(module(draw(8, 6)), net().eval()(draw(8, 6)))
            compiler.finish()
    assert [text for text in caplog.messages if "runs in torch: INTERNAL: no such instruction" in text]


def test_values_at_which_torch_raises_do_so_on_both_sides(compiler):
    module = torch.compile(nn.Embedding(4, 2), backend=jaxtrain)
    for _ in range(2):
        with pytest.raises(IndexError):
            module(torch.tensor([1, 5]))
        compiler.finish()


ENDING = """
import os, signal, sys, threading, time
import torch
from torch_bridge.capture.backend import jaxtrain
from torch_bridge.capture.meanwhile import one_core_less

model = torch.nn.Sequential(*[part for _ in range(60) for part in (torch.nn.Linear(8, 8), torch.nn.Tanh())])
torch.compile(model, backend=jaxtrain)(torch.ones(2, 8)).sum().backward()
time.sleep(float(sys.argv[1]))
print(time.time(), flush=True)
if sys.argv[2] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
sys.exit(3)
"""


@pytest.mark.parametrize(("after_s", "how", "code"), [(1, "exit", 3), (3, "interrupted", -2)])
def test_a_process_ends_at_once_while_xla_compiles(after_s, how, code, tmp_path):
    environment = child_environment() | {"JAXTRAIN_WAIT": "0", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ENDING, str(after_s), how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code
    assert time.time() - float(ended.stdout) < 10
    assert "terminate called" not in ended.stderr
    assert "Traceback" not in ended.stderr or how == "interrupted"


LOADING = """
import time
import torch
from jaxtrain.runtime import background, compile_cache
from torch_bridge.capture.backend import jaxtrain
from torch_bridge.capture.meanwhile import one_core_less

count = compile_cache.watch()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
torch.compile(model, backend=jaxtrain)(torch.ones(2, 8)).sum().backward()
while background._queue._thread is not None:
    time.sleep(0.1)
print(count.requests, count.hits, count.misses)
"""


def test_another_process_compiles_and_this_one_loads(tmp_path):
    environment = child_environment() | {"JAXTRAIN_WAIT": "0", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LOADING]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["2", "2", "0"]


def test_torch_leaves_a_core_to_the_compiler_and_takes_it_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with one_core_less():
            with one_core_less():  # in another thread, say
                assert torch.get_num_threads() == 2
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
        torch.set_num_threads(1)
        with one_core_less():
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
