"""Training goes on where the other side stopped: N steps in torch and N in JAX are 2 N in torch, and the reverse."""

import functools
import pathlib

import jax
import numpy as np
import pytest
import torch

from jaxtrain import UserError, export
from tests.contract.tasks import tiny
from torch_bridge.datasets import to_torch

pytestmark = pytest.mark.slow

N = 20
EPS = "optim.eps=1e-6"  # the key biases' gradient is zero: at 1e-8 Adam would make steps of its rounding
OPTIMIZERS = {
    "adamw": (EPS, "optim.name=adamw", "optim.weight_decay=0.1", "optim.lr=1e-3"),
    "adam": (EPS, "optim.name=adam", "optim.weight_decay=0.01", "optim.lr=1e-3"),
    "sgd": ("optim.name=sgd", "optim.momentum=0.9", "optim.nesterov=true", "optim.weight_decay=0.01", "optim.lr=0.05"),
}


def settings(*more: str) -> tuple[str, ...]:
    """Decay, groups, clipping, cosine with warm-up; float32; no dropout, which no two programs share."""
    return (
        "model.dropout=0",
        f"train.steps={2 * N}",
        "train.epochs=null",
        "evaluation.every_epochs=null",
        "optim.decay_bias_and_norm=false",
        "optim.clip_norm=0.5",
        "optim.schedule.name=cosine",
        "data.placement=host",
        "precision.matmul=highest",
        *more,
    )


def plain_torch(trainer, name: str):
    """Twin, optimizer and scheduler as a torch user writes them: two groups, unnamed."""
    config, twin = trainer.config.optim, trainer.task.twin.build(trainer.config)
    twin.load_state_dict({key: to_torch(value) for key, value in trainer.state_dict().items()})
    parameters = list(twin.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    make = {
        "adamw": functools.partial(torch.optim.AdamW, lr=config.lr, eps=config.eps),
        "adam": functools.partial(torch.optim.Adam, lr=config.lr, eps=config.eps),
        "sgd": functools.partial(torch.optim.SGD, lr=config.lr, momentum=0.9, nesterov=True),
    }[name]
    optimizer = make(groups)
    return twin, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, trainer.program.schedule)


def train_torch(trainer, twin, optimizer, scheduler, steps: range) -> None:
    twin.train()
    for step in steps:
        batch = jax.tree.map(to_torch, trainer.train_loader.host_batch(step))
        optimizer.zero_grad()
        trainer.task.twin.loss(twin, batch, trainer.config).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), trainer.config.optim.clip_norm)
        optimizer.step()
        scheduler.step()


def distance(state, twin) -> float:
    """Relative L2 over all parameters together."""
    theirs = {key: value.numpy() for key, value in twin.state_dict().items()}
    assert state.keys() == theirs.keys()
    difference = sum(float(np.square(np.asarray(state[key], np.float64) - theirs[key]).sum()) for key in theirs)
    return (difference / sum(float(np.square(value.astype(np.float64)).sum()) for value in theirs.values())) ** 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_then_jax_is_torch_all_the_way(name, tmp_path):
    first = tiny("digits.classify", tmp_path / "unused", *settings(*OPTIMIZERS[name]))
    twin, optimizer, scheduler = plain_torch(first, name)
    train_torch(first, twin, optimizer, scheduler, range(N))
    path = tmp_path / "torch.pt"
    saved = {"model_state_dict": twin.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save({**saved, "scheduler_state_dict": scheduler.state_dict(), "global_step": N}, path)
    train_torch(first, twin, optimizer, scheduler, range(N, 2 * N))

    second = tiny("digits.classify", tmp_path / "run", *settings(*OPTIMIZERS[name]), "seed=0", f"init_from={path}")
    second.train()
    assert int(second.state.updates) == 2 * N
    assert distance(second.state_dict(), twin) < 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_jax_then_torch_is_torch_all_the_way(name, tmp_path):
    whole = tiny("digits.classify", tmp_path / "unused", *settings(*OPTIMIZERS[name]))
    twin, optimizer, scheduler = plain_torch(whole, name)
    train_torch(whole, twin, optimizer, scheduler, range(2 * N))

    half = tiny("digits.classify", tmp_path / "run", *settings(*OPTIMIZERS[name]), f"checkpoint.every_steps={N}")
    half.train()
    path = export.export_training_state(tmp_path / "run", tmp_path / "half.pt", str(N))
    saved = torch.load(path, weights_only=True)
    other, optimizer, scheduler = plain_torch(whole, name)
    other.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    assert saved["step"] == N
    train_torch(whole, other, optimizer, scheduler, range(saved["step"], 2 * N))
    assert distance({key: value.numpy() for key, value in other.state_dict().items()}, twin) < 1e-5
    assert distance(half.state_dict(), twin) < 1e-5


def test_a_jax_run_goes_on_from_its_own_file_bit_for_bit(tmp_path):
    same = settings(*OPTIMIZERS["adamw"], "model.dropout=0.2", "optim.ema_decay=0.9")
    whole = tiny("digits.classify", tmp_path / "whole", *same, f"checkpoint.every_steps={N}", "checkpoint.keep_last=9")
    whole.train()
    path = export.export_training_state(tmp_path / "whole", tmp_path / "half.pt", str(N))
    rest = tiny("digits.classify", tmp_path / "rest", *same, f"init_from={path}")
    rest.train()
    for part in ("params", "ema", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(whole.state, part), getattr(rest.state, part))


def checkpoint(tmp_path, change=None, **parts) -> pathlib.Path:
    """A torch checkpoint of the digits twin after one AdamW step; `change` may alter it."""
    trainer = tiny("digits.classify", tmp_path / "unused", *settings(*OPTIMIZERS["adamw"]))
    twin, optimizer, scheduler = plain_torch(trainer, "adamw")
    train_torch(trainer, twin, optimizer, scheduler, range(1))
    content = {"model": twin.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    if change is not None:
        change(content)
    path = tmp_path / "torch.pt"
    torch.save(content, path)
    return path


def amsgrad(content):
    content["optimizer"]["param_groups"][0]["amsgrad"] = True


def momentum(content):
    content["optimizer"]["state"] = {0: {"momentum_buffer": torch.zeros(1, 16, 16)}}


def other_groups(content):
    group = content["optimizer"]["param_groups"][0]
    content["optimizer"]["param_groups"] = [{**group, "params": [0]}, {**group, "params": [1, 2]}]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (amsgrad, "made with amsgrad=True, which is not offered here"),
        (momentum, "holds momentum_buffer; optim.name=adamw wants exp_avg, exp_avg_sq"),
        (other_groups, "groups of [1, 2] parameters are none that this run can tell apart"),
        (lambda content: content.update(step=2 * N), f"stands at step {2 * N} and this run ends at {2 * N}"),
    ],
)
def test_another_optimizer_is_refused_with_what_to_do(change, expected, tmp_path):
    path = checkpoint(tmp_path, change)
    trainer = tiny("digits.classify", tmp_path / "run", *settings(*OPTIMIZERS["adamw"]), f"init_from={path}")
    with pytest.raises(UserError) as caught:
        trainer.train()
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_options_that_differ_are_named(tmp_path):
    path = checkpoint(tmp_path)
    more = ("optim.beta2=0.95", "optim.lr=5e-4")
    trainer = tiny("digits.classify", tmp_path / "run", *settings(*OPTIMIZERS["adamw"], *more), f"init_from={path}")
    trainer.train()
    log = (tmp_path / "run" / "train.log").read_text()
    assert "optimizer group default: betas is (0.9, 0.999) in the file, (0.9, 0.95) here" in log
    assert "optimizer group default: lr is 0.001 in the file, 0.0005 here" in log


def test_init_optimizer_false_takes_the_weights_alone(tmp_path):
    path = checkpoint(tmp_path)
    trainer = tiny(
        "digits.classify",
        tmp_path / "run",
        *settings(*OPTIMIZERS["adamw"]),
        f"init_from={path}",
        "init_optimizer=false",
    )
    trainer.train()
    assert int(trainer.state.updates) == 2 * N
    assert f"started from the weights of {path}" in (tmp_path / "run" / "train.log").read_text()
