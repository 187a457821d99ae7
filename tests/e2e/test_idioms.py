"""Idioms of users' losses and modules, each trained in torch and compiled: losses, weights and Python's own values are
the same, and it is told which are one program, with one compilation for each program."""

import importlib.util
import logging

import numpy as np
import pytest
import torch

import jaxtrain
from tests.e2e.idioms import data, gradients, libraries, python_values  # noqa: F401  (each adds its cases)
from tests.e2e.idioms.case import CASES

LOOSE = {"autocast_region": 2e-2, "timm_resnet": 2e-3}  # relative; bfloat16, and batch statistics of few pixels
# Biases of attention's keys have rounding alone for a gradient, which Adam scales up to its rate: losses are compared.
LOSSES_ONLY = {"hf_bert", "timm_vit", "transformer_encoder"}
NEEDS = {"hf_bert": "transformers", "hf_gpt2": "transformers", "hf_t5": "transformers", "timm_vit": "timm"}
NEEDS |= {"timm_resnet": "timm", "torchmetrics_in_loss": "torchmetrics", "scipy_assignment": "scipy"}
FAST = {"attribute_beta", "gan", "text_in_batch", "branch_on_number"}  # among the tests of a change
IN_TORCH = {  # name -> why it is not one program
    "tensors_appended": "a list grows at each call",
    "deque_of_losses": "Dynamo does not follow a deque with maxlen",
    "list_of_values": "Python branches on values of a tensor",
    "scipy_assignment": "scipy computes on an output",
    "python_random": "Python branches on a random number",
    "numpy_random": "numpy draws a random number",
    "iterator_in_loss": "it takes from an iterator of elsewhere",
    "clock": "it reads the clock",
    "prints": "a print comes where it stands",
    "raises_on_nan": "Python branches on the value of a tensor",
    "branch_on_tensor": "Python branches on the value of a tensor",
    "torchmetrics_in_loss": "the metric branches on the value of a tensor",
}
PROGRAMS = {  # name -> how many programs it needs, where that is more than one: a number is a constant in the first
    **dict.fromkeys("attribute_beta counter_in_forward counter_that_warms_up math_of_number".split(), 2),
    **dict.fromkeys("global_that_changes text_in_batch features_list_by_hooks running_average_in_python".split(), 2),
    **dict.fromkeys("requires_grad_flips layer_replaced criterion_exchanged gan".split(), 2),
    **dict.fromkeys("branch_on_number branch_every_third float_branch logs_every_fifth".split(), 3),
    "lookup_by_number": 4,
    "short_last_batch": 4,  # the first size once more, when sizes have become symbolic
}


class Compilations(logging.Handler):
    """Counts XLA's compilations of steps by jax's log lines."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.count = 0

    def emit(self, record):
        self.count += "Finished XLA compilation of jit(_update)" in record.getMessage()


class InTorch(logging.Handler):
    """Collects what the product says of steps that torch runs."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        if "in torch" in record.getMessage():
            self.lines.append(record.getMessage())


def torchs(modules, loss_fn, optimizer):
    def step(batch):
        optimizer.zero_grad()
        found = loss_fn(*modules, batch)
        (found[0] if isinstance(found, tuple) else found).backward()
        optimizer.step()
        return found

    return step


def steps_of(case, compiled):
    several = isinstance(case.modules, dict)
    modules = case.modules if several else {"module": case.modules}
    made = case.optimizer(case.modules)
    updates = {name: (loss, optimizer) for name, loss, optimizer in (made if several else [("loss", case.loss, made)])}
    if compiled:
        many = jaxtrain.compile_many(modules, updates)
        return [many[name] for name in updates]
    return [torchs(tuple(modules.values()), *update) for update in updates.values()]


def train(name, compiled):
    """Return losses, weights and the numbers that Python holds."""
    torch.manual_seed(0)
    case, losses = CASES[name](), []
    steps = steps_of(case, compiled)
    for number, batch in enumerate(case.data):
        if case.before:
            case.before(number, case.modules)
        for step in steps:
            found = step(batch)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
    for step in steps if compiled else ():
        step.sync()
    inside = case.modules.values() if isinstance(case.modules, dict) else [case.modules]
    weights = [float(value.detach().double().abs().sum()) for one in inside for value in one.state_dict().values()]
    return losses, weights, [float(value) for value in case.observe()] if case.observe else []


@pytest.fixture
def watched(caplog):
    """Return (compilations, what the product says of torch) of the test."""
    import jax

    compilations, in_torch = Compilations(), InTorch()
    pairs = [(logging.getLogger(name), in_torch) for name in ("jaxtrain", "torch_bridge")]
    pairs += [(logging.getLogger(name), compilations) for name in ("jax._src.dispatch", "jax._src.interpreters.pxla")]
    for logger, handler in pairs:
        logger.addHandler(handler)
    logging.getLogger("jaxtrain").setLevel(logging.INFO)
    logging.getLogger("torch_bridge").setLevel(logging.INFO)
    jax.config.update("jax_log_compiles", True)
    yield compilations, in_torch
    jax.config.update("jax_log_compiles", False)
    for logger, handler in pairs:
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in CASES])
def test_an_idiom_trains_as_in_torch_and_is_one_program_unless_listed(name, watched):
    if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    compilations, in_torch = watched
    want = train(name, compiled=False)
    got = train(name, compiled=True)
    limit = LOOSE.get(name, 1e-4)
    for what, ours, theirs, most in zip(
        ("losses", "weights", "python"), got, want, (limit, 10 * limit, 1e-3), strict=True
    ):
        if what != "weights" or name not in LOSSES_ONLY:
            np.testing.assert_allclose(ours, theirs, rtol=max(most, 1e-3 * (what == "python")), atol=1e-6, err_msg=what)
    assert bool(in_torch.lines) == (name in IN_TORCH), in_torch.lines
    if name not in IN_TORCH:
        assert compilations.count <= PROGRAMS.get(name, 1)
