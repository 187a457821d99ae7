"""`jaxtrain.pad_graphs`: batches of graphs in a few sizes, of which padding changes no number."""

import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain.errors import UserError

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_mean_pool

GRAPHS = 160


def graphs():
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(GRAPHS):
        nodes = int(torch.randint(2, 24, (), generator=generator))
        edges = torch.randint(nodes, (2, nodes * 3), generator=generator)
        attributes = torch.randn(nodes * 3, 2, generator=generator)
        made.append(Data(x=torch.randn(nodes, 4, generator=generator), edge_index=edges, edge_attr=attributes,
                         y=torch.randn(1, generator=generator)))  # fmt: skip
    return made


class Net(nn.Module):
    def __init__(self, middle=nn.ReLU):
        super().__init__()
        self.conv = GINConv(nn.Sequential(nn.Linear(4, 8), middle(), nn.Linear(8, 8)))
        self.out = nn.Linear(8, 1)

    def forward(self, batch):
        x = self.conv(batch.x, batch.edge_index).relu()
        return self.out(global_mean_pool(x, batch.batch, size=batch.num_graphs)).squeeze(1)


def weighted(net, batch):
    wrong = (net(batch) - batch.y).square()
    return torch.where(batch.real_graphs, wrong, 0.0).sum() / batch.real_graphs.sum()


def test_a_thousand_random_batches_have_at_most_four_sizes():
    loader = jaxtrain.pad_graphs(DataLoader(graphs(), 16, shuffle=True), Net(), weighted)
    shapes = {(b.x.shape, b.edge_index.shape, b.y.shape) for _ in range(100) for b in loader}
    assert len(shapes) <= 4
    assert all(shape[2] == (17,) for shape in shapes)


def test_compiled_steps_on_padded_batches_end_at_torchs_weights_on_the_batches_themselves():
    torch.manual_seed(0)
    net, data = Net(), graphs()
    twin = Net()
    twin.load_state_dict(net.state_dict())
    whole = DataLoader(data, 16)
    loader = jaxtrain.pad_graphs(DataLoader(data, 16), net, weighted)
    step = jaxtrain.compile(net, weighted, torch.optim.SGD(net.parameters(), 0.05), wait=True)
    optimizer = torch.optim.SGD(twin.parameters(), 0.05)
    for padded, batch in zip(loader, whole, strict=True):
        step(padded)
        optimizer.zero_grad()
        (twin(batch) - batch.y).square().mean().backward()
        optimizer.step()
    step.sync()
    assert step.torch is None
    assert len(step.programs) <= 4
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("net", "loss_fn"),
    [
        (Net, lambda net, batch: (net(batch) - batch.y).square().mean()),
        (lambda: Net(lambda: nn.BatchNorm1d(8)), weighted),
    ],
)
def test_a_loss_that_the_added_graph_changes_is_refused(net, loss_fn):
    with pytest.raises(UserError, match=r"changes by .* weight each graph's loss by batch.real_graphs"):
        jaxtrain.pad_graphs(DataLoader(graphs(), 16), net(), loss_fn)


def test_a_loader_of_tensors_is_refused():
    with pytest.raises(UserError, match="wanted torch_geometric's Data"):
        jaxtrain.pad_graphs(DataLoader([torch.zeros(3)] * 8, 4), Net(), weighted)
