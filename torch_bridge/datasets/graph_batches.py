"""Pad torch_geometric's batches of graphs to a few sizes of nodes, edges and graphs, so that few programs are compiled.

What is added is a graph of its own, the last one: copies of two nodes of the batch that an edge joins, and copies of
that edge. All its values are ones that the data have, so that no formula meets a distance of 0 or a kind of atom that
there is not. Needs no torch_geometric: a batch's own methods tell which of its tensors belong to nodes and edges.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxtrain.errors import UserError

DRAWN = 512  # batches that sizes are chosen from
QUANTILES = (0.5, 0.9, 1.0)  # of them that a size covers; the last size covers every batch there can be
CLOSE = 1.25  # a size that is so much smaller than the next, or less, is not worth a program
GHOSTS = 2  # nodes at least in the added graph, so that its edges join two
TOLERANCE = 1e-5  # relative, of loss and gradients in float64
NODES, GRAPHS = "real_nodes", "real_graphs"  # names of the masks


class Size(NamedTuple):
    """Nodes and edges of a padded batch, the added graph's among them."""

    nodes: int
    edges: int


def choose_sizes(nodes: Sequence[int], edges: Sequence[int], batch_size: int, most: int) -> list[Size]:
    """Return at most `most` sizes, ascending; the last one holds every batch of `batch_size` of these graphs. nodes,
    edges: of each graph. The choice is the same at every call."""
    counts = np.stack([np.asarray(nodes), np.asarray(edges)], 1)
    batch_size = min(batch_size, len(counts))
    largest = np.sort(counts, 0)[-batch_size:].sum(0)
    generator = np.random.default_rng(0)
    drawn = [counts[generator.choice(len(counts), batch_size, replace=False)].sum(0) for _ in range(DRAWN)]
    asked = [np.quantile(np.stack(drawn), q, axis=0, method="higher") for q in QUANTILES[: most - 1]]
    sizes = [largest]
    for size in reversed(asked):
        if (sizes[-1] > CLOSE * size).any():
            sizes.append(size)
    return [Size(_even(n) + GHOSTS, _even(e) + 1) for n, e in reversed(sizes)]


def _even(count: Any) -> int:
    """Round up to a multiple of 8."""
    return -(-int(count) // 8) * 8


class PaddedGraphs:
    """A loader's batches, padded. sizes: those that a batch may have. Iterating, `len` and other attributes are the
    loader's."""

    def __init__(self, loader: Any, module: torch.nn.Module, loss_fn: Callable[[Any, Any], Any], most: int = 4):
        """Choose the sizes, and prove on the first batch that padding does not matter.

        Raises UserError for a loader without `batch_size`, for data that are no graphs, and if loss or gradients of
        `loss_fn(module, batch)` change with the padding.
        """
        self.loader = loader
        graphs = getattr(loader, "batch_size", None)
        if not isinstance(graphs, int):
            raise UserError("pad_graphs: the loader has no batch_size, wanted torch_geometric's DataLoader with one")
        if most < 1:
            raise UserError(f"pad_graphs: sizes={most}, wanted at least 1")
        data = [loader.dataset[i] for i in range(len(loader.dataset))]
        if not data or not hasattr(data[0], "edge_index"):
            kind = type(data[0]).__name__ if data else "nothing"
            raise UserError(f"pad_graphs: the dataset holds {kind}, wanted torch_geometric's Data with edge_index")
        nodes, edges = ([int(getattr(each, name)) for each in data] for name in ("num_nodes", "num_edges"))
        self.graphs = graphs
        self.sizes = choose_sizes(nodes, edges, graphs, most)
        first = loader.collate_fn(data[: max(1, graphs - 1)])
        check(module, loss_fn, pad(first, first.num_nodes, first.num_edges, first.num_graphs, 0), self.pad(first))

    def pad(self, batch: Any) -> Any:
        """Return the batch in the smallest size that holds it."""
        for size in self.sizes:
            if batch.num_nodes + GHOSTS <= size.nodes and batch.num_edges < size.edges:
                return pad(batch, size.nodes, size.edges, self.graphs + 1)
        raise UserError(
            f"pad_graphs: a batch of {batch.num_nodes} nodes and {batch.num_edges} edges is larger than any of "
            f"{self.graphs} graphs of the dataset; was the dataset changed? Call pad_graphs again"
        )

    def __iter__(self) -> Iterator[Any]:
        return map(self.pad, self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)


def pad(batch: Any, nodes: int, edges: int, graphs: int, ghosts: int = GHOSTS) -> Any:
    """Return a batch with so many nodes, edges and graphs, and bool masks `real_nodes` and `real_graphs`. Graphs that
    have no node stand before the added one. ghosts: 0 for a batch that only gets its masks."""
    real = {"nodes": batch.num_nodes, "edges": batch.num_edges, "graphs": batch.num_graphs}
    added = {"nodes": nodes - real["nodes"], "edges": edges - real["edges"], "graphs": graphs - real["graphs"]}
    made = copy.copy(batch)
    if ghosts:
        joined = batch.edge_index[:, 0] if real["edges"] else torch.tensor([0, real["nodes"] - 1])
        for name, value in batch.to_dict().items():
            if not isinstance(value, torch.Tensor) or name in ("batch", "ptr", "edge_index"):
                continue
            if batch.is_node_attr(name):
                more = _alternating(value[joined], added["nodes"])
            elif batch.is_edge_attr(name):
                first = value[:1] if real["edges"] else value.new_zeros(1, *value.shape[1:])
                more = first.expand(added["edges"], *value.shape[1:])
            elif value.dim() and len(value) == real["graphs"]:
                more = value[:1].expand(added["graphs"], *value.shape[1:])
            else:
                raise UserError(
                    f"pad_graphs: `{name}` of shape {tuple(value.shape)} belongs to neither the {real['nodes']} nodes, "
                    f"the {real['edges']} edges nor the {real['graphs']} graphs of a batch; leave it out of Data"
                )
            setattr(made, name, torch.cat([value, more]))
        ghost = torch.tensor([[real["nodes"]], [real["nodes"] + 1]], device=batch.edge_index.device)
        made.edge_index = torch.cat([batch.edge_index, ghost.expand(2, added["edges"])], 1)
        made.batch = torch.cat([batch.batch, torch.full((added["nodes"],), graphs - 1, device=batch.batch.device)])
        ends = [real["nodes"]] * (added["graphs"] - 1) + [nodes]
        made.ptr = torch.cat([batch.ptr, torch.tensor(ends, device=batch.ptr.device)])
        made._num_graphs = graphs
    setattr(made, NODES, torch.arange(nodes, device=batch.batch.device) < real["nodes"])
    setattr(made, GRAPHS, torch.arange(graphs, device=batch.batch.device) < real["graphs"])
    return made


def _alternating(pair: torch.Tensor, count: int) -> torch.Tensor:
    return pair[torch.arange(count, device=pair.device) % len(pair)]


def check(module: torch.nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, padded: Any) -> None:
    """Raise UserError if loss, gradients or buffers after one training step's forward and backward pass depend on the
    padding. Both are computed by torch in float64, with copies of the module and one random state."""
    one, other = (_results(module, loss_fn, each) for each in (batch, padded))
    for name, value in one.items():
        scale = float(value.abs().max()) if value.numel() else 0.0
        away = float((value - other[name]).abs().max()) if value.numel() else 0.0
        if not away <= TOLERANCE * max(scale, 1e-6):
            raise UserError(
                f"pad_graphs: {name} changes by {away:.2g} ({away / max(scale, 1e-30):.1e} of it) when a graph that is "
                "not one of the data's joins the batch: weight each graph's loss by batch.real_graphs, each node's by "
                "batch.real_nodes, and pool with size=batch.num_graphs; a BatchNorm over nodes needs whole batches"
            )


def _results(module: torch.nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any) -> dict[str, torch.Tensor]:
    double, given = copy.deepcopy(module).double(), copy.copy(batch)
    for name, value in batch.to_dict().items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(given, name, value.double())
    for inner in double.modules():
        if isinstance(inner, torch.nn.modules.dropout._DropoutNd):
            inner.p = 0.0  # its draws would differ by the number of nodes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = loss_fn(double, given)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
    found = {"the loss": loss.detach()}
    found |= {f"the gradient of {n}": p.grad for n, p in double.named_parameters() if p.grad is not None}
    return found | {f"the buffer {n}": b.detach() for n, b in double.named_buffers() if b.is_floating_point()}
