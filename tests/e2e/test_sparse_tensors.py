"""A loop with tensors that no compiled program takes trains in torch around what is compiled, to torch's weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from jaxtrain.accelerate import Accelerator
from tests.e2e.loops import assert_same, torch_step

DRAW = torch.Generator().manual_seed(3)
ADJACENCY = torch.rand(7, 7, generator=DRAW).mul_(torch.rand(7, 7, generator=DRAW) > 0.6).to_sparse()


class Convolution(nn.Module):
    """As the graph convolution of Kipf and Welling: the adjacency is an argument or, with none, a buffer."""

    def __init__(self, adjacency=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4) * 0.3)
        self.head = nn.Linear(4, 3)
        self.register_buffer("adjacency", adjacency, persistent=False)

    def forward(self, x, adjacency=None):
        return self.head(torch.relu((self.adjacency if adjacency is None else adjacency) @ (x @ self.weight)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, packed):
        return self.head(self.rnn(packed)[1][0])


class Lazy:
    """A matrix that is computed when asked for, as gpytorch's kernels: it has a shape and is no tensor."""

    dtype, shape = torch.float32, torch.Size([7, 7])

    def __init__(self, rows):
        self.rows = rows

    def __matmul__(self, x):
        return self.rows @ (self.rows.T @ x)


def _rows(number, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def _packed(number):
    lengths = torch.tensor([4, 2, 3])
    return nn.utils.rnn.pack_padded_sequence(_rows(number, 3, 4, 5), lengths, batch_first=True, enforce_sorted=False)


def _nested(number):
    return torch.nested.nested_tensor([_rows(number, 3, 5), _rows(number + 1, 2, 5)])


CASES = {
    "an argument": (Convolution, lambda m, b: m(b, ADJACENCY).square().mean(), lambda i: _rows(i, 7, 5)),
    "in compressed rows": (
        Convolution, lambda m, b: m(b, ADJACENCY.to_sparse_csr()).square().mean(), lambda i: _rows(i, 7, 5),
    ),
    "in the batch": (Convolution, lambda m, b: m(*b).square().mean(), lambda i: (_rows(i, 7, 5), ADJACENCY)),
    "a buffer": (lambda: Convolution(ADJACENCY), lambda m, b: m(b).square().mean(), lambda i: _rows(i, 7, 5)),
    "in the loss": (
        lambda: nn.Linear(5, 4), lambda m, b: (ADJACENCY @ m(b)).square().mean(), lambda i: _rows(i, 7, 5),
    ),
    "nested": (
        lambda: nn.Linear(5, 4), lambda m, b: torch.nested.to_padded_tensor(m(b), 0.0).square().mean(), _nested,
    ),
    "a lazy matrix": (
        Convolution, lambda m, b: m(b, Lazy(b / 5)).square().mean(), lambda i: _rows(i, 7, 5),
    ),
    "a lazy matrix in the batch": (
        Convolution, lambda m, b: m(*b).square().mean(), lambda i: (_rows(i, 7, 5), Lazy(_rows(i, 7, 5))),
    ),
    "a packed sequence": (Recurrent, lambda m, b: m(b).square().mean(), _packed),
}  # fmt: skip


def _trained(case, engine):
    build, loss_fn, batch = CASES[case]
    torch.manual_seed(0)
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    if engine == "compile":
        step = jaxtrain.compile(module, loss_fn, optimizer)
    elif engine == "accelerate":
        step = torch_step(Accelerator(cpu=True).prepare(module), optimizer, loss_fn)
    else:
        step = torch_step(module, optimizer, loss_fn)
    losses = [float(step(batch(number))) for number in range(4)]
    if engine == "compile":
        step.sync()
    return losses, module


@pytest.mark.filterwarnings("ignore:.*(CSR|nested).*:UserWarning")
@pytest.mark.parametrize("engine", ["compile", "accelerate"])
@pytest.mark.parametrize("case", CASES)
def test_four_steps_end_with_torchs_losses_and_weights(case, engine):
    wanted, theirs = _trained(case, "torch")
    losses, module = _trained(case, engine)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same(theirs, module)


def test_a_trainer_refuses_a_sparse_buffer_by_its_name(tmp_path):
    module = nn.Linear(5, 3)
    module.register_buffer("adjacency", ADJACENCY)
    data = torch.utils.data.TensorDataset(_rows(0, 14, 5), torch.zeros(14, dtype=torch.long))
    config = TrainingConfig(num_epochs=1, batch_size=7, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"adjacency is a sparse tensor.*to_dense\(\)"):
        Trainer(module, data, None, config, loss=F.cross_entropy).train()
