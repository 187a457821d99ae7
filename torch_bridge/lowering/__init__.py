"""torch modules as JAX: `recording` makes a graph of a module, `interpreter` runs the graph on JAX arrays.

`operators` holds the lowering of each ATen operator, `selections` those whose size the data decides, `python` the state
that code keeps beside the tensors. `register(name, function)` adds or replaces a lowering.
"""

from torch_bridge.lowering.errors import Obstacle, UnsupportedModel
from torch_bridge.lowering.table import TABLE, Call, register

__all__ = ["TABLE", "Call", "Obstacle", "UnsupportedModel", "register"]
