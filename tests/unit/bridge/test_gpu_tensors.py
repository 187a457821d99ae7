"""What differs where torch's tensors lie on a GPU, as far as a machine without one can tell; `python -m
benchmarks.first_contact` runs all of it on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge import exchange, module_tensors, torch_edits


@pytest.fixture
def gpu(monkeypatch):
    """JAX says that it computes on a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_a_number_on_the_cpu_may_go_to_any_device(gpu):
    assert isinstance(exchange.to_input(torch.tensor(3)), np.ndarray)
    assert isinstance(exchange.to_input(torch.tensor([3.0])), jax.Array)  # lies where torch's does


def test_arrays_on_a_device_stay_there():
    array = jnp.arange(3)
    assert module_tensors.narrow(array) is array


def test_at_most_two_programs_wait_behind_the_running_one():
    queue, slow = exchange.Queue(), jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: y @ y / 100, x).sum())
    results = [slow(jnp.ones((400, 400)) * i) for i in range(4)]
    for result in results:
        queue.put(result, [])
    assert [result.is_ready() for result in results[: -exchange.QUEUED]] == [True, True]


@pytest.mark.parametrize(("chosen", "precision"), [("highest", "float32"), ("high", "tensorfloat32")])
def test_float32_products_on_a_gpu_have_torchs_precision(gpu, chosen, precision):
    before, ours = torch.get_float32_matmul_precision(), jax.config.jax_default_matmul_precision
    torch.set_float32_matmul_precision(chosen)
    try:
        with exchange.precision(wide=False):
            assert jax.config.jax_default_matmul_precision == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert jax.config.jax_default_matmul_precision == ours


def test_weights_are_written_from_arrays_beside_them(monkeypatch):
    monkeypatch.setattr(module_tensors, "is_on", lambda device, array: True)
    module = torch.nn.BatchNorm1d(3)
    tensors, _ = module_tensors.snapshot({"module": module})
    arrays = {name: jnp.asarray(tensor.numpy(force=True)) + 1 for name, tensor in tensors.items()}
    module_tensors.write(tensors, arrays)
    assert module.num_batches_tracked.dtype is torch.int64
    assert module.num_batches_tracked == 1
    assert torch.equal(module.running_mean, torch.ones(3))
    with torch.no_grad():
        module.weight.zero_()
    assert arrays["weight"].tolist() == [2.0, 2.0, 2.0]  # the tensors have memory of their own


@pytest.mark.parametrize(
    "values",
    [torch.randn(1000), torch.randn(3, 70).bfloat16(), torch.rand(200) > 0.5, torch.arange(5), torch.zeros(0)],
    ids=["float32", "bfloat16", "bool", "few", "none"],
)
def test_a_change_shows_in_the_sums_of_blocks(values):
    before = torch_edits.block_sums(values.reshape(-1))
    assert torch.equal(before, torch_edits.block_sums(values.clone().reshape(-1)))
    if values.numel():
        changed = values.clone().reshape(-1)
        changed[-1] = ~changed[-1] if values.dtype is torch.bool else changed[-1] + 1
        assert not torch.equal(before, torch_edits.block_sums(changed))


def test_values_that_change_places_show_in_the_sums_of_blocks():
    values = torch.randn(1024)
    assert not torch.equal(torch_edits.block_sums(values), torch_edits.block_sums(values.flip(0)))
