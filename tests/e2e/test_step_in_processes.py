"""`jaxtrain.compile` under torchrun: processes join one mesh, each with its part of the global batch."""

import json
import re
from collections.abc import Iterable

import jax
import numpy as np
import pytest

from tests import processes
from tests.e2e.step_in_processes import CASES, FSDP, LOOPS, ROWS, batches, made

COMMON = ("fsdp",)
OTHERS = sorted(LOOPS.keys() - set(COMMON))


def told(count: int, cases: Iterable[str], **environment: str) -> list[dict]:
    """Return by name what each process says of these cases."""
    running = processes.start(count, *cases, module="tests.e2e.step_in_processes", **environment)
    lists = []
    for code, output in processes.finish(running, timeout_s=600):
        assert code == 0, output
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        lists.append({line["case"]: line["found"] for line in lines})
    return lists


@pytest.fixture(scope="module")
def two():
    return told(2, COMMON)


@pytest.fixture(scope="module")
def others():
    return told(2, CASES.keys() - set(COMMON) - {"odd rows"})


def alone(options, rows=ROWS):
    module, step = made(devices=jax.devices()[:1], **{**options, "shard": "ddp"})
    return module, step, [float(step(batch)[0]) for batch in batches(rows)]


def check(name, lists):
    """Compare with one device, which takes the global batches."""
    module, step, losses = alone(LOOPS[name])
    near = 1e-5 if name != "bfloat16" else 2e-2
    moments = [entry["exp_avg"].numpy() for entry in step.optimizer.state_dict()["state"].values()]
    for process in lists:
        found = process[name]
        assert found["losses"] == pytest.approx(losses, rel=near)
        assert found["half"] == pytest.approx(found["losses"][-1], rel=1e-6)
        assert found["programs"] == (2 if name == "accumulation" else 1)
        for theirs, ours in zip(found["state"], module.state_dict().values(), strict=True):
            np.testing.assert_allclose(theirs, ours.numpy(), rtol=10 * near, atol=10 * near)
        for theirs, ours in zip(found["moments"], moments, strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=10 * near, atol=near)


def test_two_processes_train_as_one_device_on_the_global_batch_with_half_of_the_weights_each(two):
    check("fsdp", two)
    assert two[0]["fsdp"]["here"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_loop_trains_as_on_one_device(others, name):
    check(name, others)


@pytest.mark.slow
def test_a_state_saved_in_two_processes_goes_on_as_if_they_had_not_stopped(two, others):
    for found, whole in zip(others, two, strict=True):
        assert found["continued"]["losses"] == whole["fsdp"]["losses"]


@pytest.mark.slow
def test_with_ddp_one_process_may_read_the_weights_alone(others):
    for process in others:
        assert process["saved by one"]["losses"] == process["ddp"]["losses"]


@pytest.mark.slow
def test_rows_that_the_devices_of_a_process_do_not_divide_count_once():
    """Four devices in two processes, and three rows in each."""
    *_, losses = alone(FSDP, rows=6)
    (first, second) = told(2, ["odd rows"], XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert first == second
    assert first["odd rows"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert first["odd rows"]["here"] == pytest.approx(0.25, abs=0.05)


@pytest.mark.slow
def test_four_processes_train_as_one_device():
    *_, losses = alone(FSDP)
    for process in told(4, ["fsdp", "ddp"]):
        assert process["fsdp"]["losses"] == pytest.approx(losses, rel=1e-5)
        assert process["ddp"]["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("rows", "differ in the rows of the batch, .*: 8 in tensors .* on process 0; 5 in tensors .* on process 1"),
        ("rate", r"differ in the numbers that Python gives, .*'0\.00062.* on process 0; .*'0\.5'.* on process 1"),
        (
            "read",
            "differ in what they do next, .*: call 22 of loss on process 0; the weights are gathered on process 1",
        ),
    ],
)
def test_what_differs_between_the_processes_is_named_in_each(two, wrong, why):
    for process in two:
        assert re.search(why, process["fsdp"]["said"][wrong])


@pytest.mark.slow
def test_a_loss_that_cannot_be_one_program_is_refused_before_the_first_step(others):
    why = "a step over 2 processes has to be one program, and this one cannot be: a branch or shape depends on the"
    for process in others:
        assert process["branching"]["refused"].startswith(why)
