"""A program is compiled once: the second step of any loop runs what the first has compiled."""

import collections
import contextlib
import logging
import re

import jax
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(32, 6, generator=DRAW), torch.randint(0, 3, (32,), generator=DRAW)
STEPS = ("_update", "_accumulate", "_traced")  # the functions that hold a step, or a part of one


@pytest.fixture
def compiled():
    """Count XLA's compilations by the function's name."""
    counted: collections.Counter[str] = collections.Counter()

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if name := re.match(r"Compiling jit\(([^)]*)\)", record.getMessage()):
                counted[name[1]] += 1

    handler, logger = Count(), logging.getLogger("jax")
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.log_compiles())
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        yield lambda: {name: count for name, count in counted.items() if name in STEPS}


def accelerator():
    """Return a new Accelerator, whose state accelerate otherwise keeps from test to test."""
    accelerate = pytest.importorskip("accelerate")
    from jaxtrain.accelerate import Accelerator

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return Accelerator(cpu=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def loss_fn(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: optax.adam(1e-3),
    ],
)
def test_a_step_is_compiled_once(compiled, make):
    module = net()
    step = jaxtrain.compile(module, loss_fn, make(module.parameters()))
    for _ in range(4):
        step((X, Y))
    assert compiled() == {"_update": 1}


def test_reading_and_loading_between_steps_compiles_nothing(compiled):
    module = net()
    step = jaxtrain.compile(module, loss_fn, torch.optim.Adam(module.parameters()))
    for turn in range(4):
        step((X, Y))
        state = step.state_dict()
        step.load_state_dict(state)
        with torch.no_grad():
            module[0].weight.mul_(0.99)
        if turn == 2:
            step.optimizer.state[module[0].weight]["exp_avg"].mul_(0.5)
    assert compiled() == {"_update": 1}


def test_accumulation_compiles_the_first_the_later_and_the_last_call_once(compiled):
    module = net()
    step = jaxtrain.compile(module, loss_fn, torch.optim.Adam(module.parameters()), accumulate=3)
    for _ in range(9):
        step((X, Y))
    assert compiled() == {"_accumulate": 2, "_update": 1}  # the first has no gradients to add to


def test_each_of_several_updates_is_compiled_once(compiled):
    nets = {"g": net(), "d": net()}
    losses = {"g": lambda g, d, batch: loss_fn(g, batch), "d": lambda g, d, batch: (g(batch[0]) - d(batch[0])).norm()}
    updates = {name: (loss, torch.optim.Adam(nets[name].parameters())) for name, loss in losses.items()}
    steps = jaxtrain.compile_many(nets, updates)
    for _ in range(4):
        steps((X, Y))
    assert compiled() == {"_update": 2}


def test_forward_and_backward_of_accelerate_are_compiled_once(compiled):
    loop, module = accelerator(), net()
    module, optimizer = loop.prepare(module, torch.optim.Adam(module.parameters()))
    for _ in range(4):
        loop.backward(F.cross_entropy(module(X), Y))
        optimizer.step()
        optimizer.zero_grad()
    assert compiled() == {"_traced": 2}


class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.pick = nn.Linear(6, 8), nn.Linear(8, 1), torch.relu

    def forward(self, x):
        return self.head(self.pick(self.body(x)))


def masked(module, batch):
    x, mask = batch
    module.pick = lambda h: h * mask  # another function at each call
    return module(x).pow(2).mean()


def test_a_function_made_anew_at_each_call_is_compiled_for_two_calls_only(compiled):
    module, plain = Picks(), Picks()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    step = jaxtrain.compile(module, masked, torch.optim.SGD(module.parameters(), 0.1))
    for number in range(8):
        batch = X, (torch.arange(8) % (number + 2) > 0).float()
        loss = masked(plain, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(step(batch)) == pytest.approx(loss.item(), rel=1e-5)
    assert sum(compiled().values()) <= 8  # forward and backward of two calls, then of the two layers


def test_lightning_compiles_one_program(compiled, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from jaxtrain.lightning import Trainer

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            loss = loss_fn(self.net, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **quiet).fit(
        Module(), loader
    )
    assert compiled() == {"_update": 1}


def test_transformers_compiles_one_program(compiled, tmp_path):
    transformers = pytest.importorskip("transformers")
    from jaxtrain.transformers import Trainer

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.net(x), labels)}

    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=6, per_device_train_batch_size=8, **options)
    Trainer(Classifier(), arguments, train_dataset=rows).train()
    assert compiled() == {"_update": 1}


def test_a_kept_loss_keeps_no_activations():
    module = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 1))
    module, total, held = accelerator().prepare(module), 0.0, []
    for _ in range(6):
        loss = module(torch.randn(256, 64)).pow(2).mean()
        loss.backward()
        total = total + loss
        held.append(sum(array.nbytes for array in jax.live_arrays()))
    assert held[-1] - held[0] < 256 * 512 * 4  # the activations of one step


def test_a_second_backward_pass_is_torchs_error_or_torchs_gradient():
    module = accelerator().prepare(nn.Linear(3, 1))
    loss = module(torch.ones(2, 3)).mean()
    loss.backward(retain_graph=True)
    once = module.weight.grad.clone()
    loss.backward()
    assert torch.equal(module.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
