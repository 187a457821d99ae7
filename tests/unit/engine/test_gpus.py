"""Which GPUs a process takes, told from its environment alone."""

import os

import pytest

from jaxtrain.errors import UserError
from jaxtrain.nn import fused_attention
from jaxtrain.runtime import gpus, launch
from jaxtrain.train.tracking import system_metrics


def test_a_process_that_is_shown_one_gpu_takes_it_whatever_its_number():
    assert gpus.gpus_of_process(local=3, locals_=4, visible=1) is None


def test_a_process_that_sees_all_gpus_takes_that_of_its_number():
    assert gpus.gpus_of_process(local=3, locals_=4, visible=8) == [3]


def test_a_lone_process_takes_all_gpus():
    assert gpus.gpus_of_process(local=0, locals_=1, visible=8) is None


def test_more_processes_than_gpus_are_refused_with_both_numbers():
    with pytest.raises(UserError, match="process 2 of 4 on this machine finds 2 GPUs"):
        gpus.gpus_of_process(local=2, locals_=4, visible=2)


@pytest.mark.parametrize(
    ("chosen", "visible"), [("4,6", ["4", "6"]), ("", []), ("1,-1,2", ["1"]), ("GPU-a1, GPU-b2", ["GPU-a1", "GPU-b2"])]
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(chosen, visible):
    assert gpus.visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == visible


class _Device:
    def __init__(self, number):
        self.local_hardware_id = number


def test_utilisation_is_asked_of_the_processs_own_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(system_metrics.jax, "local_devices", lambda: [_Device(1)])
    assert system_metrics._own_gpus() == ["-i", "6"]


@pytest.mark.parametrize(("works", "same", "taken"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_kernel_is_taken_where_its_trial_passes_on_every_process(monkeypatch, works, same, taken):
    monkeypatch.setattr(fused_attention.jax, "process_count", lambda: 2)
    monkeypatch.setattr(fused_attention.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(launch, "agree", lambda topic, word: same)
    assert fused_attention.agreed("the kernel", works) is taken


@pytest.mark.parametrize(("given", "used"), [(None, "false"), ("true", "true")])
def test_a_loop_of_torchs_shares_the_gpu_unless_the_environment_says_otherwise(monkeypatch, given, used):
    torch = pytest.importorskip("torch")
    import jaxtrain

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", given or "")
    if given is None:
        monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    module = torch.nn.Linear(2, 1)
    jaxtrain.compile(module, lambda module, x: module(x).sum(), torch.optim.SGD(module.parameters(), 0.1))
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == used
