"""Tensors from outside the modules that a record holds as constants."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import LateEdit
from torch_bridge.lazy_scalar import LazyScalar
from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.places import value_at
from torch_bridge.torch_edits import EXACT_BYTES, CapturedTensors

ADVICE = "give its module to jaxtrain.compile_many, or the tensor in the batch"


class Constants:
    """Track the constants of a record: the tensors and arrays themselves, and the places that they come from."""

    def __init__(self) -> None:
        self._captured = CapturedTensors()
        self._bound: list[tuple[Any, Any]] = []  # (place of a constant, its value)

    def keep(self, captured: Mapping[int, torch.Tensor], inputs: PythonInputs) -> None:
        """Track these tensors, by their ids, and the arrays in the places that the code may read."""
        tensors = {str(number): tensor for number, tensor in captured.items()}
        for place in (*inputs.held, *inputs.registered):
            value = value_at(place)
            if isinstance(value, np.ndarray) and value.flags.writeable and value.dtype.kind in "biuf":
                tensors[str(id(value))] = torch.from_numpy(value)
            elif id(value.tensor() if isinstance(value, LazyScalar) else value) not in captured:
                continue
            self._bound.append((place, value))
        self._captured.add(tensors)

    def check(self, name: str, ended: bool = False) -> None:
        """Raise CannotRecord if a constant has changed since the last call, LateEdit if calls may have used the old
        value. name: of what was recorded. ended: no call follows."""
        what = f"{name} uses a tensor that it does not get as an argument, and that has changed"
        known = not ended and (
            self._captured.changed() or any(value_at(place) is not value for place, value in self._bound)
        )
        found = None if known else self._captured.changed_unseen(ended)
        if found and found[0] <= found[1]:
            raise LateEdit(
                f"{what} through .data or numpy; calls {found[0]} to {found[1]} of the step may have computed with its "
                f"old values ({EXACT_BYTES >> 20} MiB are compared at every call): {ADVICE}"
            )
        if known or (found is not None and not ended):
            raise CannotRecord(f"{what} since it was recorded as a constant: {ADVICE}")
