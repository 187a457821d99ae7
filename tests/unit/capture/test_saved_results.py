"""What an operator's forward pass keeps for torch's backward pass is torch's: factors, pivots, places, counts."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import jaxtrain
from tests.unit.lowering import compare
from torch_bridge.capture import torch_api

FILES = ("linalg", "layers", "indexing", "reductions", "windows")
CASES = {
    name: make
    for file in FILES
    for name, make in importlib.import_module(f"tests.unit.lowering.cases_{file}").CASES.items()
    if compare.installed(name) and len(compare.operator(name)._schema.returns) > 1
}
WATCHED = {"aten._linalg_det.default", "aten._linalg_slogdet.default", "aten._linalg_solve_ex.default"}
TORCHS_OWN = {"aten.multilabel_margin_loss_forward.default"}  # torch's rule for it is another function


@pytest.fixture(autouse=True)
def _nothing_captured():
    torch_api.reset()


def _compiled(function):
    return torch.compile(function, backend="jaxtrain", options={"wait": True}, dynamic=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in WATCHED else pytest.mark.slow)
        for name in sorted(CASES)
        if name not in TORCHS_OWN
    ],
)
def test_torchs_backward_pass_over_a_compiled_forward_is_torchs(name):
    @settings(compare.PROPERTY, max_examples=3)
    @given(st.data())
    def holds(data):
        case = CASES[name](compare.Draw(data))
        leaves, spec = pytree.tree_flatten((case.args, case.kwargs))
        fixed = {id(tensor) for tensor in case.fixed}
        places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.is_floating_point()]
        places = [i for i in places if id(leaves[i]) not in fixed]

        def run(*tensors):
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = pytree.tree_unflatten(filled, spec)
            results = compare.operator(name)(*args, **kwargs)[: case.outputs]
            return [result for result in results if torch.is_tensor(result) and result.requires_grad]

        sides = []
        for function in (run, _compiled(run)) if case.gradient and places else ():
            inputs = [leaves[place].detach().clone().requires_grad_() for place in places]
            results = function(*inputs)
            weights = [torch.linspace(-1, 2, result.numel()).reshape(result.shape).to(result) for result in results]
            sides.append(torch.autograd.grad(results, inputs, weights, allow_unused=True) if results else ())
        for wanted, mine in zip(*sides, strict=True) if sides else ():
            if wanted is not None:
                compare._close(mine.numpy(), wanted, compare.Case((), scale=5 * case.scale))

    holds()


def _view(kind):
    return {
        "whole": lambda x: x,
        "transposed": lambda x: x.mT,
        "a part": lambda x: x[..., :3, :3],
        "a transposed copy": lambda x: x.mT.contiguous(),
        "a product": lambda x: x @ x.mT + torch.eye(4),
    }[kind]


@pytest.mark.parametrize("view", ["whole", "transposed", "a part", "a transposed copy", "a product"])
@pytest.mark.parametrize(
    "function", [torch.det, torch.logdet, lambda x: torch.linalg.slogdet(x)[1]], ids=["det", "logdet", "slogdet"]
)
def test_a_determinant_of_a_view_has_torchs_gradient(function, view):
    torch.manual_seed(0)
    x = (torch.randn(2, 4, 4) + 3 * torch.eye(4)).requires_grad_()
    wanted, mine = (
        torch.autograd.grad(call(x), x, torch.tensor([1.0, -2.0]))[0]
        for call in (lambda x: function(_view(view)(x)), _compiled(lambda x: function(_view(view)(x))))
    )
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


class _Flow(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.matrix).square().mean() - torch.linalg.slogdet(self.matrix)[1] + torch.det(self.matrix) ** 2


def _labels(module, batch):
    return F.multilabel_margin_loss(module(batch), torch.tensor([[0, 2, -1, 1], [3, -1, 1, 1], [-1, 0, 1, 2]]))


@pytest.mark.parametrize(
    ("make", "loss"),
    [(_Flow, lambda module, batch: module(batch)), (lambda: nn.Linear(4, 4), _labels)],
    ids=["determinants", "labels that end at -1"],
)
def test_steps_have_torchs_losses(make, loss):
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    torch.manual_seed(0)
    module = make()
    optimizer, wanted = torch.optim.SGD(module.parameters(), 1e-2), []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(module, batch)
        value.backward()
        optimizer.step()
        wanted.append(value.item())
    torch.manual_seed(0)
    module = make()
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 1e-2), wait=True)
    assert [float(step(batch)) for batch in batches] == pytest.approx(wanted, rel=1e-5)
    assert ("torch runs it" in step.explain()) == (loss is _labels)


def test_labels_that_end_at_minus_one_have_torchs_loss_under_the_backend():
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    assert _compiled(lambda x: _labels(nn.Identity(), x))(x) == _labels(nn.Identity(), x)


def test_one_hot_is_compiled_and_refuses_the_classes_that_torch_refuses():
    def loss(module, batch):
        x, classes = batch
        return (F.one_hot(classes, 3).float() * module(x)).square().mean()

    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 1e-2), wait=True)
    x = torch.randn(3, 4)
    for classes in ([0, 1, 2], [2, 2, 0]):
        wanted = loss(module, (x, torch.tensor(classes))).item()
        assert float(step((x, torch.tensor(classes)))) == pytest.approx(wanted, rel=1e-6)
    assert "torch runs it" not in step.explain()
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"the batch holds class {wrong}, wanted 0 to 2"):
            step((x, torch.tensor([0, wrong, 1])))
        with pytest.raises(RuntimeError, match="Class values"):
            _compiled(lambda x: F.one_hot(x, 3))(torch.tensor([0, wrong]))
