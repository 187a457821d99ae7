"""What a step sends and keeps on GPUs that are not here: eight H200s, compiled for in a process of its own."""

import json

import pytest

from tests.processes import finish, start

pytestmark = pytest.mark.slow

AS_PLANNED = {"XLA_FLAGS": ""}  # a GPU's program is compiled as a user's is
CONFIG = """
task: tests.e2e.planned_transformer
model: {width: 1024, depth: 4, heads: 8, vocabulary: 2048, length: 256}
data: {batch_size: 64, placement: host}
precision: {policy: bf16}
train: {steps: 10, remat: full}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.yaml").write_text(CONFIG)

    def make(*arguments: str) -> dict:
        out = folder / "plan.json"
        given = ("--config", str(folder / "plan.yaml"), "--devices", "8", "--json", str(out), *arguments)
        code, printed = finish(start(1, *given, module="jaxtrain.plan", **AS_PLANNED))[0]
        assert code in (0, 1), printed
        return json.loads(out.read_text()) | {"returncode": code, "printed": printed}

    return make


@pytest.fixture(scope="module")
def fsdp(plan):
    return plan("shard.strategy=fsdp", "--no-fit")


def test_fsdp_keeps_an_eighth_of_the_state_on_each_device(fsdp):
    assert fsdp["state_bytes"] == pytest.approx(12 * fsdp["parameters"] / 8, rel=0.05)


def test_fsdp_needs_no_all_to_all_and_no_permutation(fsdp):
    assert {"all-to-all", "collective-permute"}.isdisjoint(fsdp["collectives"])


def test_fsdp_sends_what_it_must_within_a_tenth(fsdp):
    sent = sum(fsdp["collectives"][kind]["bytes"] for kind in ("all-gather", "reduce-scatter"))
    assert sent == pytest.approx(sum(fsdp["minimum_bytes"].values()), rel=0.10)


def test_ddp_reduces_every_gradient_once_within_a_twentieth(plan):
    ddp = plan("shard.strategy=ddp", "--no-fit")
    assert ddp["collectives"]["all-reduce"]["bytes"] == pytest.approx(ddp["minimum_bytes"]["all-reduce"], rel=0.05)


def test_devices_that_share_a_row_send_keys_and_gather_weights_alone(tmp_path):
    out = tmp_path / "plan.json"
    smaller = ("model.num_layers=2", "model.vocab_size=4096", "data.max_length=16384", "data.tokenizer=bytes")
    given = ("--config", "configs/memory_lm_128k.yaml", "--devices", "8", "--no-fit", "--json", str(out), *smaller)
    code, printed = finish(start(1, *given, module="jaxtrain.plan", **AS_PLANNED))[0]
    assert code == 0, printed
    plan = json.loads(out.read_text())
    assert plan["collectives"]["all-gather"]["bytes"] < 1.1 * plan["minimum_bytes"]["all-gather"]
    assert plan["collectives"]["collective-permute"]["bytes"] > 0
    assert "all-to-all" not in plan["collectives"]


def test_a_model_that_does_not_fit_exits_with_1(plan):
    few = ("data.batch_size=8", "model.length=8", "model.vocabulary=64")  # XLA looks long for memory to save, in vain
    big = plan("--target", "a6000", "model.width=12288", "model.depth=3", "shard.strategy=ddp", "--no-fit", *few)
    assert big["returncode"] == 1
    assert "DOES NOT FIT" in big["printed"]


def test_a_prediction_names_its_kernels_and_its_price(plan):
    found = plan("--no-fit", "--predict", "--price", "2.5")["predicted"]
    assert found["compute_ms"] > 0.1
    assert 0 < found["mfu"] < 1
    assert any("planned_transformer" in row["source"] or "nn/" in row["source"] for row in found["dearest"])
    assert found["per_million_samples"] == pytest.approx(1e6 / found["samples_per_s"] / 3600 * 8 * 2.5)


def test_a_batch_larger_than_the_example_is_planned(tmp_path):
    """A plan has no data but the task's example, 51 samples here; drop_last would leave no batch of them."""
    out = tmp_path / "plan.json"
    given = ("--config", "configs/sherlock_gen1_tiny.yaml", "--devices", "1", "--no-fit", "--json", str(out))
    larger = ("data.batch_size=256", "data.drop_last=true")
    code, printed = finish(start(1, *given, *larger, module="jaxtrain.plan", **AS_PLANNED))[0]
    assert code == 0, printed
    assert json.loads(out.read_text())["batch_size"] == 256
