"""What precision and dispatch may change in a run of any task: within its tolerance, and nothing at all."""

import json

import numpy as np
import pytest

from jaxtrain.task import find_task
from tests.contract.tasks import TASKS, assert_equal, final_parameters, tiny

STEPS = ("train.steps=8", "train.log_every_steps=1", "evaluation.every_epochs=null")


def last_loss(trainer) -> float:
    """Mean training loss of the last four steps: one batch alone is noise."""
    trainer.train()
    lines = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    return float(np.mean([line["values"]["loss"] for line in lines if line["split"] == "train"][-4:]))


@pytest.mark.parametrize("name", TASKS)
def test_bf16_and_fp16_reach_the_loss_of_fp32_within_the_tasks_tolerance(name, tmp_path):
    few_overflows = "precision.loss_scale=64"  # a skipped step would leave fp16 an update behind
    policies = ("fp32", "bf16", "fp16")
    losses = [last_loss(tiny(name, tmp_path / p, *STEPS, few_overflows, f"precision.policy={p}")) for p in policies]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=find_task(name).tolerance)


@pytest.mark.parametrize("name", TASKS)
def test_several_steps_per_call_give_the_same_bits_as_one(name, tmp_path):
    results = []
    for count in (1, 4):
        trainer = tiny(name, tmp_path / str(count), *STEPS, f"train.steps_per_call={count}")
        trainer.train()
        results.append(final_parameters(trainer))
    assert_equal(*results)
