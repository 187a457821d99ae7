"""Kinds of GPU and TPU that programs can be planned for, and the table of `plan --shop`."""

import json

import pytest

from jaxtrain import shop
from jaxtrain.errors import UserError
from jaxtrain.runtime import topology, tpu_topology
from jaxtrain.runtime.gpu_cards import GPUS, SHARED
from jaxtrain.runtime.peak_flops import peak_flops
from tests.processes import finish, start

ASKED = "b200 gb200 h100 h100-pcie h100-nvl a100-40 a100 l4 l40s a10g t4 v100 rtx-4090 rtx-5090 rtx-pro-6000".split()


@pytest.mark.parametrize("name", ASKED)
def test_a_kind_has_every_figure_that_a_plan_needs(name):
    gpu = GPUS[name]
    assert gpu.capability in SHARED
    assert gpu.plain <= gpu.single <= gpu.half <= (gpu.fp8 or gpu.half)
    assert (gpu.fp8 is not None) == (gpu.capability >= (8, 9))
    assert gpu.bf16 == (gpu.capability >= (8, 0))
    assert topology.card(name, 1).memory == gpu.bandwidth
    assert 14 < topology.memory_bytes(name) / 2**30 < 190


def test_only_the_gpu_whose_step_was_run_is_marked_measured():
    assert [name for name, gpu in GPUS.items() if gpu.measured] == ["h200"]


def test_products_that_a_gpu_lacks_are_refused_by_name():
    with pytest.raises(UserError, match="t4: has no bf16 products; precision.policy=fp16"):
        topology.check_products("t4", "bf16")
    with pytest.raises(UserError, match="a100: has no fp8 products; precision.policy=bf16"):
        topology.check_products("a100", "fp8")
    topology.check_products("l4", "fp8")


def test_a_device_that_runs_has_the_peaks_of_its_kind():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == pytest.approx(989.4e12)
    assert peak_flops("NVIDIA GB200", "bfloat16") == pytest.approx(2500e12)
    assert peak_flops("NVIDIA L4", "float32") == pytest.approx(60e12)
    assert peak_flops("TPU v6 lite", "bfloat16") == pytest.approx(918e12)
    assert peak_flops("cpu", "float32") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100x: 2\n", "h100x is unknown"),
        ("h100: free\n", "wanted the price of one GPU"),
        ("h100: -1\n", "wanted the price"),
    ],
)
def test_a_price_file_with_a_mistake_is_refused(tmp_path, text, said):
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        shop.read_prices(str(tmp_path / "prices.yaml"))


def test_slices_of_a_tpu_are_powers_of_two_with_equal_sides():
    assert [tpu_topology._shape(count, 2) for count in (4, 8, 16, 64)] == [[2, 2], [2, 4], [4, 4], [8, 8]]
    with pytest.raises(UserError, match="slices of v5e have 1, 2, 4"):
        tpu_topology.devices("v5e", 6)


@pytest.mark.slow
def test_a_table_of_kinds_puts_the_cheapest_that_fits_first(tmp_path):
    (tmp_path / "prices.yaml").write_text("t4: 0.5\na10g: 1.0\na100: 3.0\n")
    out = tmp_path / "shop.json"
    given = (
        "--config",
        "configs/digits_tiny.yaml",
        "--devices",
        "2",
        "--shop",
        "--prices",
        str(tmp_path / "prices.yaml"),
    )
    code, printed = finish(
        start(1, *given, "--samples", "100000", "--json", str(out), module="jaxtrain.plan", XLA_FLAGS="")
    )[0]
    assert code == 0, printed
    rows = json.loads(out.read_text())
    assert {(row["target"], row["strategy"]) for row in rows} == {
        (name, strategy) for name in ("t4", "a10g", "a100") for strategy in ("ddp", "fsdp")
    }
    paid = [row["price"] for row in rows]
    assert paid == sorted(paid)
    for row in rows:
        hours = 100000 / row["samples_per_s"] / 3600
        assert row["price"] == pytest.approx(hours * 2 * {"t4": 0.5, "a10g": 1.0, "a100": 3.0}[row["target"]])
    assert "figures are predicted, not run" in printed
