"""FLOPs, peaks, rates, and the share of a run that was training."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtrain import Trainer, TrainingConfig
from jaxtrain.runtime.peak_flops import peak_flops
from jaxtrain.train.compilation import flops
from jaxtrain.train.compilation.flops import StepCost
from jaxtrain.train.loop.callbacks import Every
from jaxtrain.train.step.train_step import count_tokens
from jaxtrain.train.tracking.histograms import BINS, histogram
from jaxtrain.train.tracking.system_metrics import SystemMetrics
from jaxtrain.train.tracking.throughput import Throughput
from tests.unit.engine import runs


def counted(function, *arguments):
    return flops.count(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_a_product_counts_two_operations_per_term():
    assert counted(jnp.matmul, jnp.ones((3, 5)), jnp.ones((5, 7))) == 2 * 3 * 5 * 7
    batched = lambda a, b: jnp.einsum("bij,bjk->bik", a, b)
    assert counted(batched, jnp.ones((4, 3, 5)), jnp.ones((4, 5, 7))) == 2 * 4 * 3 * 5 * 7


def test_a_backward_pass_counts_twice_the_forward_pass():
    loss = lambda w, x: jnp.square(jnp.tanh(x @ w)).sum()
    w, x = jnp.ones((5, 7)), jnp.ones((3, 5))
    both = counted(jax.grad(loss, argnums=(0, 1)), w, x)
    assert both == 3 * counted(loss, w, x)


def test_a_convolution_counts_kernel_times_outputs():
    x, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3))
    convolve = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")
    assert counted(convolve, x, kernel) == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_a_scan_counts_its_length():
    w = jnp.ones((4, 4))
    scanned = lambda x: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=6)[0]
    assert counted(scanned, jnp.ones((2, 4))) == 6 * 2 * 2 * 4 * 4


def test_full_rematerialisation_is_no_model_work():
    assert flops.model_flops(4.0, "full") == 3.0
    assert flops.model_flops(3.0, "dots") == 3.0


@pytest.mark.parametrize(
    ("kind", "dtype", "matmul", "tflops"),
    [
        ("NVIDIA H200", jnp.bfloat16, "default", 989.4),
        ("NVIDIA A100-SXM4-80GB", jnp.float32, "default", 156.0),
        ("NVIDIA A100-SXM4-80GB", jnp.float32, "highest", 19.5),
        ("cpu", jnp.float32, "default", None),
    ],
)
def test_peaks(kind, dtype, matmul, tflops):
    peak = peak_flops(kind, dtype, matmul)
    assert peak == (tflops and tflops * 1e12)


def test_rates_leave_out_evaluation_and_saving():
    clock = Throughput(0, StepCost(samples=10, flops=1e6, devices=2, peak=1e9))
    began = clock.began
    with clock.phase("evaluation"):
        time.sleep(0.2)
    clock.add_tokens(500)
    values = clock.lap(5, began + 1.2, stall_s=0.1)
    elapsed = 1.2 - clock.seconds["evaluation"]
    assert values["samples_per_s"] == pytest.approx(50 / elapsed, rel=1e-6)
    assert values["throughput/tokens_per_s"] == pytest.approx(500 / elapsed, rel=1e-6)
    assert values["throughput/mfu"] == pytest.approx(5 * 1e6 / elapsed / 2 / 1e9, rel=1e-6)
    assert values["input_stall_ratio"] == pytest.approx(0.1 / elapsed, rel=1e-6)


def test_goodput_is_the_share_of_training():
    clock = Throughput(0, StepCost(samples=1))
    with clock.phase("compile"):
        time.sleep(0.03)
    share = clock.lap(1, clock.began + 4 * clock.seconds["compile"], stall_s=clock.seconds["compile"])
    assert share["time/goodput"] == pytest.approx(0.5, abs=0.01)  # a quarter compiling, a quarter waiting


@pytest.mark.parametrize("name", ["compile", "evaluation", "checkpoint"])
def test_a_phase_after_the_logged_step_counts_in_the_next_lap(name):
    clock = Throughput(0, StepCost(samples=10, flops=1e6, devices=2, peak=1e9))
    done = clock.began + 0.01  # step 5 was done then; its metrics are read after the phase
    time.sleep(0.01)
    with clock.phase(name):
        time.sleep(0.2)
    spent = clock.seconds[name]
    first = clock.lap(5, done, stall_s=0.005)
    second = clock.lap(10, done + spent + 0.05, stall_s=0.01)
    assert first["samples_per_s"] == pytest.approx(50 / 0.01, rel=1e-6)
    assert first["input_stall_ratio"] == pytest.approx(0.5, rel=1e-6)
    assert first["throughput/mfu"] == pytest.approx(5e6 / 0.01 / 2 / 1e9, rel=1e-6)
    assert first[f"time/{name}_s"] == 0
    assert second["samples_per_s"] == pytest.approx(50 / 0.05, rel=1e-6)
    assert second[f"time/{name}_s"] == pytest.approx(spent)


def test_a_phase_is_split_between_the_laps_that_it_fell_in():
    clock = Throughput(0, StepCost(samples=10))
    with clock.phase("evaluation"):
        time.sleep(0.2)
    spent = clock.seconds["evaluation"]
    laps = [clock.lap(step, clock.began + step * (spent + 1.0) / 4, stall_s=0.0) for step in (1, 2, 3, 4)]
    assert laps[-1]["time/evaluation_s"] == pytest.approx(spent, abs=1e-3)
    assert sum(10 / lap["samples_per_s"] for lap in laps) == pytest.approx(1.0, abs=1e-3)  # the time of training


@pytest.mark.parametrize(
    ("log_every", "per_call"),
    [(10, 1), (2, 10), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(5, 4, marks=pytest.mark.slow)],
)
def test_no_lap_of_a_run_is_faster_than_its_steps(tmp_path, log_every, per_call):
    pause = Every(1, lambda trainer, step, metrics: time.sleep(0.01))
    config = TrainingConfig(
        run={"dir": str(tmp_path), "quiet": True},
        data={"batch_size": 8},
        tracking={"tensorboard": False},
        train={"epochs": 2, "log_every_steps": log_every, "steps_per_call": per_call},
        shard={"devices": 1},
    )
    module = torch.nn.Linear(4, 1)  # the last batch of an epoch has 4 of 8 rows, and a program of its own
    rows = torch.utils.data.TensorDataset(torch.randn(23 * 8 + 4, 4), torch.randn(23 * 8 + 4, 1))
    Trainer(module, rows, rows, config, loss=torch.nn.MSELoss(), callbacks=[pause]).train()
    laps = runs.points(tmp_path)
    assert [lap["step"] for lap in laps] == [step for step in range(1, 49) if step % log_every == 0 or step == 48]
    assert max(lap["samples_per_s"] for lap in laps) < 8 / 0.01 * 3  # a step in flight is done while the host pauses
    assert sorted(lap["time/evaluation_s"] for lap in laps) == [lap["time/evaluation_s"] for lap in laps]


def test_tokens_are_those_of_valid_rows():
    batch = {"attention_mask": jnp.array([[1, 1, 0], [1, 1, 1]]), "valid": jnp.array([True, False])}
    assert float(count_tokens(batch)) == 2
    assert float(count_tokens({"x": jnp.ones(2), "valid": jnp.array([True, True])})) == 0


def test_system_metrics_read_memory_and_utilisation():
    system = SystemMetrics()
    sum(i * i for i in range(10**6))
    values = system.read()
    assert values["system/host_memory_gb"] > 0.05
    assert 0 <= values["system/cpu_utilisation"] <= 1.5
    system.close()


def test_histograms_count_like_numpy_and_leave_out_what_is_not_finite():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    counts, low, high = histogram(jnp.concatenate([values, jnp.array([jnp.nan, jnp.inf])]))
    want, _ = np.histogram(values, BINS, (float(low), float(high)))
    assert int(counts.sum()) == 1000
    assert (float(low), float(high)) == (values.min(), values.max())
    assert np.abs(np.asarray(counts) - want).sum() <= 4  # a value on an edge may fall to either side


def test_a_constant_has_a_histogram_too():
    counts, low, high = histogram(jnp.full(10, 3.0))
    assert int(counts.sum()) == 10
    assert float(low) < float(high)
