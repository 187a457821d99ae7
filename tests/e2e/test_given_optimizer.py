"""Optimizers and schedulers of the user's own in a Trainer: equal to torch's over 100 steps, and resumed exactly."""

import copy
import itertools
import json

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from jaxtrain import Trainer, TrainingConfig, UserError, config_io, evaluate, export
from jaxtrain.optim.torch_optimizer import TorchUpdate

ROWS, PER_EPOCH = 8, 10


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def data(batches: int = PER_EPOCH) -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(0)
    count = batches * ROWS
    return torch.utils.data.TensorDataset(torch.randn(count, 6, generator=draw), torch.randn(count, 1, generator=draw))


def config(folder, steps: int, **sections) -> TrainingConfig:
    return TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": ROWS, "shuffle": False},
        tracking={"tensorboard": False},
        **{"train": {"steps": steps}} | sections,
    )


def torch_loop(module, optimizer, scheduler, steps: int, every: int = 1) -> None:
    inputs, targets = data().tensors
    for step in range(steps):
        rows = slice(step % PER_EPOCH * ROWS, (step % PER_EPOCH + 1) * ROWS)
        optimizer.zero_grad()
        F.mse_loss(module(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        if scheduler is not None and (step + 1) % every == 0:
            scheduler.step()


def train(folder, module, optimizer, scheduler=None, steps: int = 100, interval: str = "step", **sections) -> Trainer:
    trainer = Trainer(
        module,
        data(),
        config=config(folder, steps, **sections),
        loss=nn.MSELoss(),
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_interval=interval,
    )
    trainer.train()
    return trainer


def assert_same(theirs: nn.Module, ours: nn.Module, atol: float = 1e-5) -> None:
    for (name, want), got in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=atol, rtol=1e-5, err_msg=name)


def compare(folder, make, schedule=None, steps: int = 100, interval: str = "step", before: int = 0) -> None:
    """Train twice, in torch and here, and compare weights, state and rates. before: steps in torch first."""
    made = []
    for _ in range(2):
        module = net()
        optimizer = make(module)
        scheduler = None if schedule is None else schedule(optimizer)
        torch_loop(module, optimizer, scheduler, before)
        made.append((module, optimizer, scheduler))
    (their, their_optimizer, their_scheduler), (our, our_optimizer, our_scheduler) = made
    torch_loop(their, their_optimizer, their_scheduler, steps, 1 if interval == "step" else PER_EPOCH)
    train(folder, our, our_optimizer, our_scheduler, steps, interval)
    assert_same(their, our)
    want, got = their_optimizer.state_dict(), our_optimizer.state_dict()
    assert got["state"].keys() == want["state"].keys()
    for number, entries in want["state"].items():
        for name, value in entries.items():
            if value is not None:
                np.testing.assert_allclose(got["state"][number][name], value, atol=1e-5, rtol=1e-4, err_msg=name)
    assert [group["lr"] for group in got["param_groups"]] == [group["lr"] for group in want["param_groups"]]
    if schedule is not None:
        assert our_scheduler.get_last_lr() == their_scheduler.get_last_lr()


def groups(module) -> list[dict]:
    return [
        {"params": module[0].parameters(), "lr": 3e-3, "weight_decay": 0.1},
        {"params": module[2].parameters(), "lr": 1e-2},
    ]


OPTIMIZERS = {
    "AdamW": lambda m: torch.optim.AdamW(groups(m), amsgrad=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 1e-2, weight_decay=0.1),
    "SGD": lambda m: torch.optim.SGD(groups(m), momentum=0.9, nesterov=True),
    "RMSprop": lambda m: torch.optim.RMSprop(groups(m), momentum=0.5, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(groups(m), lr_decay=0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adamax": lambda m: torch.optim.Adamax(groups(m)),
    "NAdam": lambda m: torch.optim.NAdam(groups(m), decoupled_weight_decay=True),
    "RAdam": lambda m: torch.optim.RAdam(groups(m)),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), 1e-3),
    "ASGD": lambda m: torch.optim.ASGD(groups(m)),
}

SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.99),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 7, 0.8),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 50], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 20),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=30),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.98),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 90)], [10]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 100, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 40),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 10), lr_scheduler.ExponentialLR(o, 0.99)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 20, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=100),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, 20),
}


def sgd(module):
    return torch.optim.SGD(module.parameters(), 0.02, momentum=0.8)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_equal_torch_over_100_steps(tmp_path, name):
    compare(tmp_path, OPTIMIZERS[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_of_a_scheduler_has_torchs_numbers_for_100_steps(name):
    made = []
    for _ in range(2):
        optimizer = sgd(net())
        made.append((optimizer, SCHEDULES[name](optimizer)))
    (optimizer, scheduler), (theirs, their_scheduler) = made
    names = {id(parameter): str(number) for number, parameter in enumerate(optimizer.param_groups[0]["params"])}
    [table] = TorchUpdate(optimizer, names).table(scheduler, 100)
    for row in range(100):
        group = theirs.param_groups[0]
        got = {key: column[min(row, len(column) - 1)] for key, column in table.items()}
        assert got["lr"] == np.float32(group["lr"])
        assert got["momentum"] == np.float32(group["momentum"])
        theirs.step()
        their_scheduler.step()
    assert scheduler.get_last_lr() == SCHEDULES[name](sgd(net())).get_last_lr(), "the object itself was stepped"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SequentialLR", "CyclicLR", "ChainedScheduler"])
def test_torch_schedulers_equal_torch_over_100_steps(tmp_path, name):
    compare(tmp_path, sgd, SCHEDULES[name])


def test_every_scheduler_of_torch_is_tried():
    kinds = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type)}
    own = {name for name in kinds if name.endswith(("LR", "Restarts", "ChainedScheduler"))}
    assert own <= set(SCHEDULES)


@pytest.mark.slow
def test_state_of_the_middle_of_a_run_is_taken_over_and_given_back(tmp_path):
    compare(tmp_path, OPTIMIZERS["AdamW"], SCHEDULES["OneCycleLR"], steps=60, before=40)


@pytest.mark.slow
def test_a_scheduler_may_be_stepped_once_an_epoch(tmp_path):
    compare(tmp_path, OPTIMIZERS["Adam"], SCHEDULES["ExponentialLR"], steps=50, interval="epoch")


def test_parameters_that_the_optimizer_does_not_hold_stay(tmp_path):
    module = net()
    before = copy.deepcopy(module.state_dict())
    train(tmp_path, module, torch.optim.SGD(module[2].parameters(), 0.1), steps=3)
    moved = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    assert moved == ["2.weight", "2.bias"]


OPTAX = {
    "adabelief": optax.adabelief(1e-2),
    "lamb": optax.lamb(1e-2),
    "novograd": optax.novograd(1e-2),
    "yogi": optax.yogi(1e-2),
    "value": optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=2)),
    "schedule": optax.adamw(optax.cosine_decay_schedule(1e-2, 100)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTAX)
def test_optax_optimizers_follow_optax_over_100_steps(tmp_path, name):
    module, transform = net(), optax.with_extra_args_support(OPTAX[name])
    params = {key: np.asarray(value.detach()) for key, value in module.named_parameters()}
    inputs, targets = (np.asarray(tensor) for tensor in data().tensors)

    def loss(params, x, y):
        hidden = jax.numpy.tanh(x @ params["0.weight"].T + params["0.bias"])
        return jax.numpy.mean((hidden @ params["2.weight"].T + params["2.bias"] - y) ** 2)

    @jax.jit
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = transform.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    state = transform.init(params)
    for index in range(100):
        rows = slice(index % PER_EPOCH * ROWS, (index % PER_EPOCH + 1) * ROWS)
        params, state = step(params, state, inputs[rows], targets[rows])
    train(tmp_path, module, OPTAX[name])
    for key, value in module.named_parameters():
        np.testing.assert_allclose(value.detach().numpy(), params[key], atol=1e-5, rtol=1e-5)


def test_an_optax_schedule_gives_the_rates_of_the_configured_optimizer(tmp_path):
    settings = config(tmp_path, 4, train={"steps": 4, "log_every_steps": 1})
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    trainer = Trainer(net(), data(), config=settings, loss=nn.MSELoss(), scheduler=schedule)
    trainer.train()
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [point["values"]["lr"] for point in points if point["split"] == "train"]
    np.testing.assert_allclose(rates, [0.1, 0.075, 0.05, 0.025], rtol=1e-6)
    assert trainer.total_steps == 4


class Stop:
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, metrics):
        if step == self.step:
            trainer.run.stop()


def test_a_run_with_a_torch_optimizer_is_resumed_bit_for_bit(tmp_path):
    def made(folder, callbacks=()):
        module = net()
        optimizer = torch.optim.AdamW(groups(module))
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 12)
        torch_loop(module, optimizer, scheduler, 2)
        trainer = Trainer(
            module, data(), config=config(folder, 12), loss=nn.MSELoss(), optimizer=optimizer, scheduler=scheduler,
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
        return module, optimizer, scheduler

    whole, whole_optimizer, whole_scheduler = made(tmp_path / "whole")
    made(tmp_path / "cut", [Stop(5)])
    resumed, optimizer, scheduler = made(tmp_path / "cut")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    for number, entries in whole_optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            assert torch.equal(optimizer.state_dict()["state"][number][name], value), name
    assert scheduler.last_epoch == whole_scheduler.last_epoch == 14


def refused(match: str, module=None, **given):
    module = net() if module is None else module
    with pytest.raises(UserError, match=match):
        Trainer(module, data(), config=given.pop("config", None), loss=nn.MSELoss(), **given)


def test_what_has_no_counterpart_is_refused_by_name(tmp_path):
    module = net()
    parameters = list(module.parameters())
    adam = torch.optim.Adam(parameters, 1e-3)
    refused("LBFGS has no counterpart", module, optimizer=torch.optim.LBFGS(parameters))
    refused("of the 4 parameters of group 0 are not the module's", optimizer=adam)
    refused(
        "ReduceLROnPlateau follows a metric", module, optimizer=adam, scheduler=lr_scheduler.ReduceLROnPlateau(adam)
    )
    other = lr_scheduler.StepLR(torch.optim.Adam(parameters, 1e-3), 1)
    refused("made for this very optimizer", module, optimizer=adam, scheduler=other)
    refused("comes with optimizer=", module, scheduler=other)
    refused("holds its own schedule", module, optimizer=optax.adam(1e-3), scheduler=lambda step: 1e-3)
    refused("wanted a torch.optim optimizer", module, optimizer="adam")
    refused("optim.lr is set", module, optimizer=adam, config=TrainingConfig(lr=1e-3))
    refused("wanted step or epoch", module, optimizer=adam, scheduler_interval="batch")
    refused("missing .* 'value_fn'", module, optimizer=optax.lbfgs())
    short = lr_scheduler.OneCycleLR(adam, 1e-2, total_steps=5)
    with pytest.raises(UserError, match="the run takes 9 of its steps"):
        train(tmp_path, module, adam, short, steps=9)
    calls = itertools.count()
    counting = lr_scheduler.LambdaLR(adam, lambda step: 0.9 ** next(calls))
    with pytest.raises(UserError, match="two copies of this LambdaLR give different numbers at step 1"):
        train(tmp_path, module, adam, counting, steps=9)


@pytest.mark.slow
def test_the_commands_evaluate_a_run_with_a_given_optimizer_and_export_its_weights(tmp_path, capsys):
    task, settings = config_io.load("configs/digits_tiny.yaml", [f"run.dir={tmp_path}/run", "train.epochs=1"])
    settings = settings.model_copy(update={"optim": type(settings.optim)()})
    trainer = Trainer(config=settings, task=task, optimizer=optax.adabelief(1e-3))
    wanted = trainer.train()["val_history"][-1]["loss"]
    run = ["--run", f"{tmp_path}/run"]
    assert evaluate.main([*run, "--checkpoint", "last", "--output", f"{tmp_path}/found.json"]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["metrics"]["loss"] == pytest.approx(wanted, rel=1e-6)
    assert export.main([*run, "--output", f"{tmp_path}/weights.pt"]) == 0
    assert export.main([*run, "--output", f"{tmp_path}/all.pt", "--optimizer"]) == 2
    assert "this run was trained with an optax transformation" in capsys.readouterr().err
