"""What XLA makes of the training step for an H200, read from small models' programs: no GPU needed."""

import json

import pytest

from tests.h200_programs import CASES
from tests.processes import finish, start

pytestmark = pytest.mark.slow
pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra `plan` is not installed")


@pytest.fixture(scope="module")
def facts():
    code, printed = finish(start(1, module="tests.h200_programs", XLA_FLAGS=""), timeout_s=900)[0]
    assert code == 0, printed
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_is_sorted(facts, name):
    assert facts[name]["sorts_of_activations"] == []


@pytest.mark.parametrize("name", CASES)
def test_no_product_of_weights_is_float32_under_bf16(facts, name):
    assert facts[name]["float32_products"] == []


@pytest.mark.parametrize("name", CASES)
def test_neither_scores_nor_masks_of_token_by_token_reach_memory(facts, name):
    assert facts[name]["token_by_token"] == []
    assert "formula" not in facts[name]["attention"]


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_updated_in_place(facts, name):
    assert facts[name]["aliased_bytes"] >= 0.99 * facts[name]["state_bytes"]


@pytest.mark.parametrize("name", CASES)
def test_no_large_array_is_copied(facts, name):
    assert facts[name]["largest_copy_bytes"] < 64 << 20


@pytest.mark.parametrize("name", ["bert", "memory_lm"])
def test_gradients_of_look_ups_are_sent_once_and_in_half_precision(facts, name):
    """Banks that several layers read were sent by each of them, in float32: five times what is needed."""
    bytes_sent, fewest = facts[f"{name} on 8"]
    assert bytes_sent <= 1.1 * fewest


def test_dropout_takes_the_kernel_that_knows_it_and_the_rest_cudnn(facts):
    assert set(facts["bert"]["attention"]) == {"Triton, with dropout"}
    assert {kind for name in ("memory_lm", "hjepa", "timm_vit") for kind in facts[name]["attention"]} == {"cuDNN"}
