"""`pad_graphs`: torch_geometric's batches in a few sizes."""

from collections.abc import Callable
from typing import Any


def pad_graphs(loader: Any, module: Any, loss_fn: Callable[[Any, Any], Any], sizes: int = 4) -> Any:
    """Return the loader with its batches padded to few sizes of nodes, edges and graphs.

    Sizes are chosen from the counts of all graphs of its dataset, so that every batch fits one. What is added is one
    graph of copied nodes and edges; batch.real_graphs and batch.real_nodes are False for it.

    Args:
        loader: torch_geometric's DataLoader with a batch_size.
        module: the module that is trained.
        loss_fn: (module, batch) -> a scalar, as for `jaxtrain.compile`. It has to weight by the two masks, and to pool
            with size=batch.num_graphs.
        sizes: at most so many.

    Raises:
        UserError: before the first batch, if the loss, a gradient or a buffer depends on the padding by more than 1e-5
            (computed by torch in float64), and for a loader or data that are no graphs.

    Examples:
        >>> import torch, torch_geometric, jaxtrain
        >>> edges = lambda nodes: torch.combinations(torch.arange(nodes)).T
        >>> graphs = [
        ...     torch_geometric.data.Data(x=torch.randn(n, 2), edge_index=edges(n)) for n in (3, 4, 5, 6) * 4
        ... ]
        >>> module = torch.nn.Linear(2, 1)
        >>> loss_fn = lambda module, batch: (
        ...     torch.where(batch.real_nodes, module(batch.x).squeeze(1), 0.0).sum() / batch.real_nodes.sum()
        ... )
        >>> loader = torch_geometric.loader.DataLoader(graphs, 4, shuffle=True)
        >>> padded = jaxtrain.pad_graphs(loader, module, loss_fn, sizes=2)
        >>> len({batch.x.shape for _ in range(20) for batch in padded}) <= 2
        True
    """
    from torch_bridge.datasets.graph_batches import PaddedGraphs

    return PaddedGraphs(loader, module, loss_fn, sizes)
