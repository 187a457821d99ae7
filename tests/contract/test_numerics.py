"""What precision and dispatch may change in a run of any task: within its tolerance, and nothing at all."""

import numpy as np
import pytest

from tests.chaos.runs import points
from tests.contract.tasks import (
    TASKS,
    WHOLE,
    assert_equal,
    final_parameters,
    once_a_system,
    tiny,
    whole_run,
)

TOLERANCE = 0.05  # relative, of the loss in half precision
UNSEEN = (*WHOLE, "evaluation.every_steps=null")  # an evaluation would be compiled too


@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp16", marks=once_a_system)])
@pytest.mark.parametrize("name", TASKS)
def test_half_precision_reaches_the_loss_of_fp32_to_five_per_cent(name, policy, tmp_path):
    few_overflows = "precision.loss_scale=64"  # a skipped step would leave fp16 an update behind
    tiny(name, tmp_path, *UNSEEN, few_overflows, f"precision.policy={policy}").train()
    losses = [values["loss"] for _, split, values in points(tmp_path) if split == "train"]
    after_eight_steps = lambda losses: float(np.mean(losses[4:8]))  # one batch alone is noise
    assert after_eight_steps(losses) == pytest.approx(after_eight_steps(whole_run(name).losses), rel=TOLERANCE)


@once_a_system
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.usefixtures("optimised")
def test_several_steps_per_call_give_the_same_bits_as_one(name, tmp_path):
    runs = [tiny(name, tmp_path / str(n), *UNSEEN, "train.steps=12", f"train.steps_per_call={n}") for n in (1, 4)]
    for trainer in runs:
        trainer.train()
    assert_equal(*map(final_parameters, runs))
