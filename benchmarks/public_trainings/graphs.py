"""Graphs, with torch_geometric's layers and without."""

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, GINConv, NNConv, SAGEConv, global_add_pool, global_mean_pool

from benchmarks.public_trainings import Training, adam, one, training


def graph(nodes: int = 10, edges: int = 24, **more) -> Data:
    return Data(x=torch.randn(nodes, 6), edge_index=torch.randint(0, nodes, (2, edges)), **more)


class TwoLayers(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, data):
        return self.second(F.elu(self.first(data.x, data.edge_index)), data.edge_index)


def whole_graph(module: nn.Module) -> Training:
    """Train on one graph, the loss over the rows of a mask."""
    mask = torch.zeros(10, dtype=torch.bool)
    mask[:6] = True
    data = graph(y=torch.randint(0, 3, (10,)), train_mask=mask)
    optimizer = torch.optim.Adam(module.parameters(), 0.01, weight_decay=5e-4)
    loss = lambda m, d: F.cross_entropy(m(d)[d.train_mask], d.y[d.train_mask])
    return one(module, loss, [data], optimizer)


@training("GCN", "torch_geometric, self loops and degrees, loss over a mask")
def gcn() -> Training:
    return whole_graph(TwoLayers(GCNConv(6, 12), GCNConv(12, 3)))


@training("GAT", "torch_geometric, softmax over edges of a node")
def gat() -> Training:
    return whole_graph(TwoLayers(GATConv(6, 4, heads=3), GATConv(12, 3, heads=1, concat=False)))


@training("GraphSAGE", "link prediction: positives and negatives by edge")
def sage() -> Training:
    def loss(m, batch):
        data, wrong = batch
        z = m(data)
        near, far = ((z[edges[0]] * z[edges[1]]).sum(1) for edges in (data.edge_index, wrong))
        scores = torch.cat([near, far])
        return F.binary_cross_entropy_with_logits(scores, torch.cat([torch.ones_like(near), torch.zeros_like(far)]))

    module = TwoLayers(SAGEConv(6, 12), SAGEConv(12, 8))
    return one(module, loss, [(graph(), torch.randint(0, 10, (2, 24))) for _ in range(2)])


@training("GIN", "batches of graphs of several sizes, pooled by graph")
def gin() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = lambda a: GINConv(nn.Sequential(nn.Linear(a, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12)))
            self.first, self.second, self.out = layer(6), layer(12), nn.Linear(12, 3)

        def forward(self, data):
            x = self.second(F.relu(self.first(data.x, data.edge_index)), data.edge_index)
            return self.out(global_add_pool(x, data.batch, size=3))

    make = lambda: Batch.from_data_list([graph(n, 3 * n, y=torch.randint(0, 3, (1,))) for n in (4, 6, 5)])
    return one(Net(), lambda m, d: F.cross_entropy(m(d), d.y), [make() for _ in range(2)])


@training("message passing on molecules", "weights made of edges, GRU over rounds, pooled regression")
def mpnn() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.conv = (
                nn.Linear(6, 8),
                NNConv(8, 8, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 64)), "mean"),
            )
            self.gru, self.out = nn.GRU(8, 8), nn.Linear(8, 1)

        def forward(self, data):
            y = F.relu(self.inp(data.x))
            h = y[None]
            for _ in range(2):
                y, h = self.gru(F.relu(self.conv(y, data.edge_index, data.edge_attr))[None], h)
                y = y.squeeze(0)
            return self.out(global_mean_pool(y, data.batch, size=2)).squeeze(1)

    make = lambda: Batch.from_data_list(
        [graph(n, 2 * n, edge_attr=torch.randn(2 * n, 4), y=torch.randn(1)) for n in (5, 7)]
    )
    module = Net()
    return one(module, lambda m, d: F.mse_loss(m(d), d.y), [make()] * 2, adam(module))


@training("graph by hand", "index_add and scatter_reduce over edges, no library")
def by_hand() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.edge, self.node, self.out = nn.Linear(12, 12), nn.Linear(24, 12), nn.Linear(12, 1)

        def forward(self, x, edges):
            a, b = edges
            sent = F.relu(self.edge(torch.cat([x[a], x[b]], 1)))
            total = torch.zeros(len(x), 12).index_add_(0, b, sent)
            most = torch.zeros(len(x), 12).scatter_reduce(0, b[:, None].expand(-1, 12), sent, "amax", include_self=True)
            return self.out(F.relu(self.node(torch.cat([total, most], 1)))).squeeze(1)

    make = lambda: (torch.randn(10, 6), torch.randint(0, 10, (2, 24)), torch.randn(10))
    return one(Net(), lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]), [make() for _ in range(2)])
