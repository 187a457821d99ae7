"""The filled table: importing this module registers every lowering of the package."""

from torch_bridge.lowering import (  # noqa: F401
    activations,
    attention,
    creation,
    elementwise,
    embeddings,
    factorizations,
    gamma_functions,
    grids,
    indexing,
    losses,
    lu,
    normalization,
    norms,
    pooling,
    printing,
    products,
    randomness,
    recurrent,
    reductions,
    resizing,
    special,
    symbolic,
    views,
    without_derivative,
)
from torch_bridge.lowering.table import TABLE

without_derivative.refuse(TABLE)

__all__ = ["TABLE"]
