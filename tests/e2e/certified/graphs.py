"""Graph networks of torch_geometric: a batch of signals on one graph, and of dense graphs."""

import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, GCNConv, dense_diff_pool
from torch_geometric.nn.dense import DenseGCNConv, DenseSAGEConv

from tests.e2e.certified import SAMPLES, Certified, classes, rows

NODES = 6


class Signals(nn.Module):
    """Two GCN layers on a graph that all samples share. x: float [batch, node, 4]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (GCNConv(i, o, node_dim=-2, add_self_loops=False) for i, o in ((4, 8), (8, 5)))
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]]))

    def forward(self, x):
        return self.second(self.first(x, self.edges).relu(), self.edges).mean(1)


class Attention(nn.Module):
    """GATv2 over the nodes of one graph; a sample is a weighting of its nodes. x: float [batch, node]."""

    def __init__(self):
        super().__init__()
        self.conv = GATv2Conv(4, 5, heads=2, concat=False, add_self_loops=False)
        self.nodes = nn.Parameter(torch.randn(NODES, 4))
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]]))

    def forward(self, x):
        return x @ self.conv(self.nodes, self.edges)


class Pooling(nn.Module):
    """DiffPool on dense graphs. x: float [batch, node, 4]; adj: float [batch, node, node]."""

    def __init__(self):
        super().__init__()
        self.embed, self.assign, self.last = DenseSAGEConv(4, 8), DenseGCNConv(4, 3), DenseGCNConv(8, 5)

    def forward(self, x, adj):
        x, adj, *_ = dense_diff_pool(self.embed(x, adj).relu(), adj, self.assign(x, adj))
        return self.last(x, adj).mean(1)


def _built(kind, data):
    return lambda: (kind(), rows(**data(), label=classes()), nn.CrossEntropyLoss())


def _dense():
    adj = (torch.rand(SAMPLES, NODES, NODES) > 0.5).float()
    return {"x": torch.randn(SAMPLES, NODES, 4), "adj": adj}


MODELS = [
    Certified("GCN", _built(Signals, lambda: {"x": torch.randn(SAMPLES, NODES, 4)})),
    Certified("GATv2", _built(Attention, lambda: {"x": torch.randn(SAMPLES, NODES)})),
    Certified("DiffPool", _built(Pooling, _dense)),
]
