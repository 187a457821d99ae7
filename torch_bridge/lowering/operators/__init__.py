"""ATen operators as functions of JAX arrays, one file per family. Importing this package fills the table."""

from torch_bridge.lowering.operators import (  # noqa: F401
    activations,
    attention,
    backward,
    creation,
    elementwise,
    embeddings,
    encoder_layers,
    factorizations,
    gamma_functions,
    grids,
    indexing,
    losses,
    lu,
    normalization,
    norms,
    pooling,
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
