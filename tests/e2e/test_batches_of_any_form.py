"""Collate functions whose entries are not one row per sample."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate

from jaxtrain import Trainer, UserError
from tests.e2e.trainings import BATCH, LABELS, SAMPLES, TOKENS, X, assert_torchs, config, mlp, train_in_torch

pytestmark = pytest.mark.slow


class Graphs(torch.utils.data.Dataset):
    """Graphs of 3 to 7 nodes with twice as many edges."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        nodes, draw = 3 + index % 5, torch.Generator().manual_seed(index)
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=draw)
        return torch.randn(nodes, 6, generator=draw), edges, LABELS[index]


def joined(graphs):
    """One graph of all: nodes [all nodes, 6], edges [2, all edges], the graph of each node, one label per graph."""
    nodes, edges, labels = zip(*graphs, strict=True)
    counts = torch.tensor([len(one) for one in nodes])
    starts = (counts.cumsum(0) - counts).tolist()
    return {
        "x": torch.cat(nodes),
        "edge_index": torch.cat([one + start for one, start in zip(edges, starts, strict=True)], 1),
        "graph": torch.arange(len(graphs)).repeat_interleave(counts),
        "y": torch.stack(labels),
    }


class MessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index, graph, y):
        source, target = edge_index
        hidden = self.inner(x).relu()
        hidden = hidden + torch.zeros_like(hidden).index_add_(0, target, hidden[source])
        return self.head(torch.zeros(len(y), 8).index_add_(0, graph, hidden))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(30, 6), nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[1][0])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x, shared, scale):
        return self.inner(x) @ shared * scale


class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, first, second):
        return self.inner(first) - self.inner(second)


def time_first(samples):
    tokens, labels = default_collate(samples)
    return tokens.T.contiguous(), labels


def with_shared(samples):
    x, labels = default_collate(samples)
    return {"x": x, "shared": torch.arange(9.0).reshape(3, 3) / 9, "scale": torch.tensor(2.0), "y": labels}


def pairs(samples):
    x, labels = default_collate(samples)
    half = len(x) // 2
    return x[:half], x[half : 2 * half], labels[:half]


def of_y(output, batch):
    return F.cross_entropy(output, batch["y"])


VECTORS = torch.utils.data.TensorDataset(X, LABELS)
FORMS = {
    "graphs": (MessagePassing, Graphs(), joined, of_y, lambda m, b: of_y(m(**b), b)),
    "time_first": (
        TimeFirst,
        torch.utils.data.TensorDataset(TOKENS, LABELS),
        time_first,
        nn.CrossEntropyLoss(),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    ),
    "shared": (Scaled, VECTORS, with_shared, of_y, lambda m, b: of_y(m(b["x"], b["shared"], b["scale"]), b)),
    "pairs": (Difference, VECTORS, pairs, nn.CrossEntropyLoss(), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2])),
}


def trained(folder, form: str, **more) -> tuple[nn.Module, nn.Module]:
    make, dataset, collate, loss, _ = FORMS[form]
    torch.manual_seed(2)
    first = make()
    module = copy.deepcopy(first)
    loader = DataLoader(dataset, BATCH, collate_fn=collate)
    Trainer(module, loader, None, config(folder, **more), loss=loss).train()
    return first, module


@pytest.mark.parametrize("form", FORMS)
def test_they_reach_the_module_as_the_collate_function_gives_them(form, tmp_path):
    theirs, ours = trained(tmp_path, form)
    train_in_torch(theirs, FORMS[form][1], FORMS[form][4], FORMS[form][2])
    assert_torchs(theirs, ours)


def test_two_devices_compute_what_one_does(tmp_path):
    _, one = trained(tmp_path / "one", "graphs")
    _, two = trained(tmp_path / "two", "graphs", shard={"devices": 2, "strategy": "ddp"})
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_an_evaluation_weighs_the_batches_by_their_samples(tmp_path):
    torch.manual_seed(2)
    module, loader = MessagePassing(), DataLoader(Graphs(), BATCH, collate_fn=joined)
    trainer = Trainer(module, loader, loader, config(tmp_path), loss=of_y)
    with torch.no_grad():
        values = [(of_y(module(**batch), batch).item(), len(batch["y"])) for batch in loader]
    assert trainer.evaluate()["loss"] == pytest.approx(sum(v * n for v, n in values) / SAMPLES, abs=1e-6)


@pytest.mark.parametrize(
    "more",
    [{"train": {"steps": 3, "accumulate_steps": 2}}, {"shard": {"devices": 2, "strategy": "ddp_local"}}],
    ids=["accumulate", "ddp_local"],
)
def test_where_a_batch_has_to_be_cut_they_are_refused_by_name(more, tmp_path):
    with pytest.raises(UserError, match=r"`\w+` the shape \[.*jaxtrain.compile"):
        trained(tmp_path, "graphs", **more)


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Graphs()[index] for index in range(SAMPLES))


def test_of_a_stream_they_are_refused_with_the_rows_of_every_entry(tmp_path):
    loader = DataLoader(Stream(), BATCH, collate_fn=joined)
    with pytest.raises(UserError, match=r"`x` 37, `edge_index` 2, `graph` 37, `y` 8"):
        Trainer(MessagePassing(), loader, None, config(tmp_path), loss=of_y)
