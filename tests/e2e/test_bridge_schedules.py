"""What stands beside the optimizer crosses too: the place in a plateau rule's patience, the float16 loss scale."""

import json

import pytest
import torch

from jaxtrain import export
from jaxtrain.train.checkpoint import init_from
from tests.contract.tasks import tiny

pytestmark = pytest.mark.slow

PLATEAU = (
    # few losses are ten times better than the best
    "optim.schedule={name: plateau, factor: 0.5, patience: 1, threshold: 0.9, warmup_steps: null}",
    "optim.lr=1e-3",
    "train.epochs=null",
    "evaluation.every_epochs=null",
    "evaluation.every_steps=1",
    "train.log_every_steps=1",
)
RULE = {"factor": 0.5, "patience": 1, "threshold": 0.9}


def torch_rule():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **RULE)


def points(folder, split: str, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["values"][name] for line in lines if line["split"] == split]


@pytest.mark.parametrize("stop", [1, 4])
def test_a_plateau_rule_started_in_jax_goes_on_in_torch(stop, tmp_path):
    """stop: evaluations made in JAX; after 4 a drop is behind it and one bad evaluation counted."""
    run = tiny(
        "digits.classify", tmp_path, *PLATEAU, "train.steps=8", "checkpoint.every_steps=1", "checkpoint.keep_last=9"
    )
    run.train()
    losses, rates = points(tmp_path, "validation", "loss"), points(tmp_path, "train", "lr")
    path = export.export_training_state(tmp_path, tmp_path / "state.pt", str(stop))
    optimizer, scheduler = torch_rule()
    scheduler.load_state_dict(torch.load(path, weights_only=True)["scheduler"])
    optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    for loss, rate in zip(losses[stop:-1], rates[stop + 1 :], strict=True):
        scheduler.step(loss)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert rates[-1] < rates[0] / 2


def test_a_plateau_rule_started_in_torch_goes_on_in_jax(tmp_path):
    optimizer, scheduler = torch_rule()
    for loss in (2.0, 1.9, 1.8, 1.7):
        scheduler.step(loss)
    run = tiny("digits.classify", tmp_path / "run", *PLATEAU, "train.steps=8")
    module = {key: torch.from_numpy(value.copy()) for key, value in run.state_dict().items()}
    torch.save(
        {"model": module, "optimizer": empty(run), "scheduler": scheduler.state_dict(), "step": 4}, tmp_path / "t.pt"
    )
    origin = init_from.apply(run.program, tmp_path / "t.pt")
    assert origin.plateau == {"lr": 5e-4, "best": 2.0, "bad": scheduler.num_bad_epochs}
    again = tiny("digits.classify", tmp_path / "again", *PLATEAU, "train.steps=8", f"init_from={tmp_path / 't.pt'}")
    again.train()
    for loss, rate in zip(points(again.folder, "validation", "loss"), points(again.folder, "train", "lr"), strict=True):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        scheduler.step(loss)


def empty(run) -> dict:
    """State of an AdamW that made no step."""
    names = [(name, torch.nn.Parameter(torch.from_numpy(value.copy()))) for name, value in run.state_dict().items()]
    return torch.optim.AdamW(names, lr=1e-3).state_dict()


def test_the_loss_scale_crosses_both_ways(tmp_path):
    settings = ("precision.policy=fp16", "train.steps=4", "train.epochs=null", "evaluation.every_epochs=null")
    first = tiny("digits.classify", tmp_path / "first", *settings)
    first.train()
    saved = torch.load(export.export_training_state(tmp_path / "first", tmp_path / "a.pt"), weights_only=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.load_state_dict(saved["scaler"])
    assert scaler.get_scale() == float(first.state.scale["value"])
    assert scaler._get_growth_tracker() == int(first.state.scale["good_steps"]) > 0
    torch.save({**saved, "scaler": {**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 7}}, tmp_path / "b.pt")
    second = tiny("digits.classify", tmp_path / "second", *settings, "train.steps=9")
    init_from.apply(second.program, tmp_path / "b.pt")
    assert (float(second.state.scale["value"]), int(second.state.scale["good_steps"])) == (512.0, 7)
