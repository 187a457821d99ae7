"""Seeds, determinism and the device, which torch alone decides."""

import types
from unittest import mock

import numpy as np
import torch

from jaxtrain.systems import criteria_evidence as psy


def test_seeds_and_the_device_are_torchs(capsys, monkeypatch):
    monkeypatch.setattr(torch.backends, "cudnn", types.SimpleNamespace())  # other tests lock the flags of the process
    assert psy.set_seed(7, deterministic=False, cudnn_benchmark=True) == 7
    assert torch.backends.cudnn.benchmark
    first = (torch.rand(1), np.random.rand())
    psy.set_seed(7)
    assert not torch.backends.cudnn.benchmark
    assert (torch.rand(1), np.random.rand()) == first
    torch.use_deterministic_algorithms(False)
    assert psy.get_device(prefer_cuda=False) == torch.device("cpu")
    assert "cpu" in capsys.readouterr().out


def test_determinism_is_strict_as_in_the_original(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.backends, "cudnn", types.SimpleNamespace())
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *given, **named: calls.append((given, named)))
    psy.set_seed(7)
    assert calls == [((True,), {})]


def test_the_device_tells_what_torch_tells_of_it(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.MagicMock(total_memory=16e9))
    assert psy.get_device(device_id=1) == torch.device("cuda:1")
    assert "V100" in (printed := capsys.readouterr().out)
    assert "BFloat16" not in printed
