"""The filled table: importing this module registers every lowering of the package."""

from torch_bridge.lowering import (  # noqa: F401
    attention,
    creation,
    elementwise,
    embeddings,
    factorizations,
    grids,
    indexing,
    losses,
    normalization,
    pooling,
    products,
    randomness,
    recurrent,
    reductions,
    resizing,
    symbolic,
    views,
)
from torch_bridge.lowering.table import TABLE

__all__ = ["TABLE"]
