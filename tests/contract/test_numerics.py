"""What precision and dispatch may change in a run of any task: within its tolerance, and nothing at all."""

import functools
import json
import pathlib
import tempfile

import numpy as np
import pytest

from jaxtrain.task import find_task
from tests.contract.tasks import TASKS, assert_equal, final_parameters, tiny

STEPS = ("train.steps=8", "train.log_every_steps=1", "evaluation.every_epochs=null")


@functools.cache
def _after_eight_steps(name, *overrides):
    """Mean training loss of the last four steps (one batch alone is noise), and the parameters."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny(name, pathlib.Path(folder), *STEPS, *overrides)
        trainer.train()
        lines = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
        losses = [line["values"]["loss"] for line in lines if line["split"] == "train"]
        return float(np.mean(losses[-4:])), final_parameters(trainer)


@pytest.mark.parametrize("name", TASKS)
def test_bf16_and_fp16_reach_the_loss_of_fp32_within_the_tasks_tolerance(name):
    few_overflows = "precision.loss_scale=64"  # a skipped step would leave fp16 an update behind
    losses = [_after_eight_steps(name, few_overflows, f"precision.policy={p}")[0] for p in ("bf16", "fp16")]
    assert losses == pytest.approx([_after_eight_steps(name)[0]] * 2, rel=find_task(name).tolerance)


@pytest.mark.parametrize("name", TASKS)
def test_several_steps_per_call_give_the_same_bits_as_one(name):
    assert_equal(_after_eight_steps(name)[1], _after_eight_steps(name, "train.steps_per_call=4")[1])
