"""`pad_graphs`: torch_geometric's batches in a few sizes."""

from collections.abc import Callable
from typing import Any


def pad_graphs(loader: Any, module: Any, loss_fn: Callable[[Any, Any], Any], sizes: int = 4) -> Any:
    """Return the loader with its batches padded to at most `sizes` sizes of nodes, edges and graphs.

    loader: torch_geometric's DataLoader with a batch_size. Sizes are chosen from the counts of all graphs of its
    dataset, so that every batch fits one. What is added is one graph of copied nodes and edges; batch.real_graphs and
    batch.real_nodes are False for it. loss_fn: (module, batch) -> a scalar, as for `jaxtrain.compile`; it has to weight
    by these masks, and to pool with size=batch.num_graphs.

        loader = jaxtrain.pad_graphs(loader, module, loss_fn)
        step = jaxtrain.compile(module, loss_fn, optimizer)
        for batch in loader:
            step(batch)

    Raises UserError before the first batch if the loss, a gradient or a buffer depends on the padding by more than
    1e-5 (computed by torch in float64), and for a loader or data that are no graphs.
    """
    from torch_bridge.datasets.graph_batches import PaddedGraphs

    return PaddedGraphs(loader, module, loss_fn, sizes)
