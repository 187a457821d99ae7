"""Run torch modules in JAX: `interpreter` runs the graph on JAX arrays.

`operators` holds the lowering of each ATen operator, `selections` the operators whose result size depends on the data,
`python` the tracking of state outside tensors. `register(name, function)` adds or replaces a lowering.
"""

from torch_bridge.lowering.errors import Obstacle, UnsupportedModel
from torch_bridge.lowering.table import TABLE, Call, register

__all__ = ["TABLE", "Call", "Obstacle", "UnsupportedModel", "register"]
