"""torch modules as JAX: `export` records a module, `interpreter` runs the record, the other files lower operators.

`register(name, function)` adds or replaces a lowering.
"""

from torch_bridge.lowering.errors import Obstacle, UnsupportedModel
from torch_bridge.lowering.table import TABLE, Call, register

__all__ = ["TABLE", "Call", "Obstacle", "UnsupportedModel", "register"]
