"""Run torch code in eager torch and under torch.compile(backend=jaxtrain), and compare everything that it leaves."""

import logging

import pytest
import torch

from torch_bridge.capture import torch_api
from torch_bridge.capture.backend import jaxtrain

STEPS = 3


class Messages(logging.Handler):
    """Collects the backend's lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(make, run, tolerance=2e-5, steps=STEPS, in_torch=""):
    """make: () -> module. run: (module, compiler, step number) -> list of results; the last one is differentiated if it
    is a scalar that requires a gradient, and a step of gradient descent follows.

    Results, gradients, buffers, weights, dtypes and strides agree after each step. in_torch: text of the line that says
    why some of it ran in torch; by default nothing may.
    """
    torch_api.reset()
    messages = Messages()
    log = logging.getLogger("torch_bridge.capture.backend")
    log.addHandler(messages)
    try:
        modules = []
        for _ in range(2):
            torch.manual_seed(0)
            modules.append(make())
        compiled = {}

        def compiler(function):
            key = getattr(function, "__code__", function)
            if key not in compiled:
                compiled[key] = torch.compile(function, backend=jaxtrain)
            return compiled[key]

        for number in range(steps):
            wanted, got = (_step(module, run, c, number) for module, c in zip(modules, (plain, compiler), strict=True))
            _compare(f"step {number}", wanted, got, tolerance)
    finally:
        log.removeHandler(messages)
    lines = "\n".join(messages.lines)
    assert in_torch in lines if in_torch else not lines, lines


def plain(function):
    return function


def _step(module, run, compiler, number):
    module.zero_grad(set_to_none=True)
    results = run(module, compiler, number)
    last = results[-1]
    if isinstance(last, torch.Tensor) and last.requires_grad and last.dim() == 0:
        last.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return {
        "result": list(results),
        "gradient": [parameter.grad for parameter in module.parameters()],
        "buffer": list(module.buffers()),
    }


def _compare(where, wanted, got, tolerance):
    for kind in wanted:
        assert len(wanted[kind]) == len(got[kind])
        for place, (a, b) in enumerate(zip(wanted[kind], got[kind], strict=True)):
            name = f"{where}, {kind} {place}"
            if not isinstance(a, torch.Tensor):
                assert a == b, name
                continue
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), name
            if a.is_floating_point() or a.is_complex():
                size = float(a.detach().abs().max()) if a.numel() else 0.0
                assert torch.allclose(a, b, rtol=0, atol=tolerance * max(size, 1.0), equal_nan=True), name
            else:
                assert torch.equal(a, b), name


def raises(error, function, *arguments):
    """Return the message of the error that a call raises."""
    with pytest.raises(error) as caught:
        function(*arguments)
    return str(caught.value)
