"""What a step says of a loss that torch cannot capture: the user's line, what it does and what to write instead."""

import collections
import copy
import json
import random
import re
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import jaxtrain

KINDS = {
    "branch": (lambda m, x: m(x).mean() if x.sum() > 0 else m(x).sum(), "values of a tensor (write torch.where"),
    "branch on a number": (
        lambda m, x: m(x).mean() * (2 if m(x).mean().item() > 1 else 1),
        "values of a tensor (write",
    ),
    "number of rounds": (
        lambda m, x: sum(m(x).mean() for _ in range(int(x[0, 0] > 0) + 1)),
        "values of a tensor (write",
    ),
    "tolist": (lambda m, x: m(x).mean() * sum(x[:, 0].tolist()), "Python needs the value of a tensor"),
    "int": (lambda m, x: m(x).mean() * int(x.abs().sum()), "Python needs the value of a tensor"),
    "print": (lambda m, x: (print(end=""), m(x).mean())[1], "it prints (print after the step)"),
    "text": (lambda m, x: m(x).mean() * len(str(x.sum())), "it makes a text of a tensor"),
    "clock": (lambda m, x: m(x).mean() * (1 + 0 * time.time()), "it reads the clock"),
    "timer": (lambda m, x: m(x).mean() * (1 + 0 * time.perf_counter()), "it reads the clock"),
    "file": (lambda m, x: m(x).mean() * len(open(__file__).read(1)), "it reads or writes a file"),  # noqa: SIM115
    "Python's random": (lambda m, x: m(x).mean() * (1 + 0 * random.random()), "it draws Python's random numbers"),
    "numpy's random": (lambda m, x: m(x).mean() * float(np.random.rand()), "it draws numpy's random numbers"),
    "seed": (lambda m, x: (torch.manual_seed(0), m(x).mean())[1], "it sets the state of a random generator"),
    "packed": (
        lambda m, x: m(pack_padded_sequence(x[None], torch.tensor([3]), True).data).mean(),
        "it packs sequences (give padded batches",
    ),
    "packed list": (lambda m, x: m(pack_sequence([x, x[:2]]).data).mean(), "it packs sequences (give padded batches"),
    "sparse": (lambda m, x: torch.sparse.mm(x.to_sparse(), m.weight.T).mean(), "it makes a sparse tensor"),
    "copy": (lambda m, x: copy.deepcopy(m)(x).mean() + m(x).mean(), "copy.deepcopy (take tensor.clone())"),
    "matrix": (lambda m, x: m(torch.linalg.inv(x + 9 * torch.eye(3))).mean(), "write torch.linalg.cholesky_ex, inv_ex"),
    "thread": (lambda m, x: m(x).mean() * len(threading.current_thread().name), "it calls _thread.get_ident, which"),
    "library": (lambda m, x: m(x).mean() * json.loads("2"), "it calls Scanner, which"),
}
INTERNAL = re.compile(
    r"Attempted|marked as skipped|[Dd]ata-dependent|Failed to trace|guard on|\bu[0-9]+\b|\bzuf|VariableTracker|proxy|"
    r"fake|Tracer|with_effects|torch\._|config\."
)


@pytest.mark.parametrize("name", KINDS)
def test_the_line_what_it_does_and_what_to_write(name, caplog):
    loss, said = KINDS[name]
    torch.manual_seed(0)
    module, x = nn.Linear(3, 1), torch.randn(3, 3)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.0), wait=True)
    step(x), step(x)
    why = next(line for line in step.explain().splitlines() if "not captured" in line)
    assert said in why
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("jaxtrain", "torch_bridge"))]
    assert ours
    assert not INTERNAL.search(" ".join([why, *ours]))
    if name != "int":  # JAX, which has no lines, finds that
        assert "test_reasons.py:" in why
        assert "/lib/python" not in why


def test_a_loss_that_is_captured_has_no_reason():
    count = collections.Counter()
    module = nn.Linear(3, 1)

    def loss(module, x):
        count["calls"] += 1
        return module(x).square().mean()

    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.0), wait=True)
    step(torch.ones(3, 3)), step(torch.ones(3, 3))
    assert "not captured" not in step.explain()
