"""What a compiled step holds besides the weights: no copy of a large constant in its program, no moments in torch."""

import numpy as np
import pytest
import torch

import jaxtrain
from jaxtrain.compiled_step.capture import _Compiled


class Lookup(torch.nn.Module):
    """A table that no state dict holds, and a layer on its rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(65536, 16, generator=torch.Generator().manual_seed(0)), False)
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, ids):
        return self.layer(self.table[ids])


def steps(module, loss, batches):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = jaxtrain.compile(module, loss, optimizer)
    return step, [float(step(batch)) for batch in batches]


def torchs(module, loss, batches):
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(module, batch)
        value.backward()
        optimizer.step()
        found.append(float(value))
    return found


@pytest.mark.parametrize("where", ["buffer", "closure"])
def test_a_large_table_is_an_input_of_the_program(where, monkeypatch):
    sizes, outside = [], torch.randn(65536, 16, generator=torch.Generator().manual_seed(1))
    compiled = _Compiled._gradients

    def traced(self, arrays, values, *numbers):
        sizes.append(max(array.nbytes for array in [*arrays.values(), *values]))
        return compiled(self, arrays, values, *numbers)

    monkeypatch.setattr(_Compiled, "_gradients", traced)

    def loss(module, ids):
        rows = module(ids) if where == "buffer" else module.layer(outside[ids])
        return rows.square().mean()

    batches = [torch.randint(65536, (32,)) for _ in range(3)]
    torch.manual_seed(0)
    ours = Lookup()
    torch.manual_seed(0)
    theirs = Lookup()
    step, losses = steps(ours, loss, batches)
    np.testing.assert_allclose(losses, torchs(theirs, loss, batches), rtol=1e-5)
    assert set(sizes) == {65536 * 16 * 4}
    ids = torch.arange(5)
    if where == "buffer":
        torch.testing.assert_close(step.eval()(ids), theirs(ids), rtol=1e-5, atol=1e-6)


def test_moments_take_no_memory_in_torch_until_they_are_read():
    module = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(module.parameters())
    step = jaxtrain.compile(module, lambda module, x: module(x).square().mean(), optimizer)
    x = torch.randn(4, 256)
    float(step(x))
    entries = optimizer.state[module.weight]
    with torch._C.DisableTorchFunctionSubclass():
        assert set(entries) == {"step", "exp_avg", "exp_avg_sq"}
        assert entries["exp_avg"].detach().numpy().max() == 0  # not written yet
    assert entries["exp_avg"].abs().max() > 0
    twin = torch.nn.Linear(256, 256)
    assert optimizer.state_dict()["state"][0]["exp_avg_sq"].shape == twin.weight.shape
