"""Handle Python strings and numbers that a batch holds besides its tensors, and that differ from batch to batch."""

from collections.abc import Callable, Mapping
from typing import Any

from torch_bridge.lowering.python.changing import ChangingNumber
from torch_bridge.lowering.python.numbers import Given, Number, Paths

_PATH = "path "  # begins the key that selects a path
_ITEM = "item"  # mark that replaces each item


class PythonItems:
    """Placeholders for such items in a recorded function, which may compute with numbers, and compare and pass on the
    rest."""

    def __init__(self, name: str):
        """name: the function's name, for messages."""
        self.paths = Paths(name)

    def inputs(
        self, batch: Any, numbers: Mapping[str, Any], input_of: Callable = ChangingNumber
    ) -> tuple[Any, dict[str, Any]]:
        """Return the batch with marks in place of its items, and the step's inputs for these and for further numbers.

        input_of: converts a number to an input: torch.tensor for a step that runs in torch.
        """
        values = dict(numbers)

        def mark(leaf: Any, place: str) -> Any:
            if leaf is None or isinstance(leaf, bool) or hasattr(leaf, "shape"):
                return leaf
            values[place] = leaf
            return _ITEM

        batch = _mapped(mark, batch, _ITEM)
        inputs = {name: input_of(value) for name, value in values.items() if isinstance(value, (int, float))}
        return batch, {f"{_PATH}{self.paths.of(values)}": True, **inputs}

    def stand_ins(self, inputs: Mapping[str, Any]) -> dict[str, Number]:
        """Return the placeholder for each number and item while the function is recorded. inputs: as the step gets
        them."""
        number = next(int(name.removeprefix(_PATH)) for name in inputs if name.startswith(_PATH))
        path, values = self.paths.known[number], self.paths.values
        return {
            name: path.number(name, values, inputs[name]) if name in inputs else Given(path, name, value)
            for name, value in values.items()
        }

    @staticmethod
    def put(batch: Any, stand_ins: Mapping[str, Number]) -> Any:
        """Return the batch with its items' placeholders in place of the marks."""
        return _mapped(lambda leaf, place: stand_ins[place] if isinstance(leaf, str) else leaf, batch, _ITEM)


def _mapped(function: Callable, batch: Any, place: str) -> Any:
    """Replace every leaf of the batch by `function(leaf, place)`."""
    if isinstance(batch, Mapping):
        return {key: _mapped(function, value, f"{place} {key}") for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_mapped(function, value, f"{place} {number}") for number, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch, place)
