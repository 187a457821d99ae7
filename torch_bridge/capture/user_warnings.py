"""Warnings of torch's functions about a module's code, shown once, with the user's line and true sizes."""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_bridge.capture.attention import one_operator
from torch_bridge.capture.replay import Replay
from torch_bridge.lowering.errors import MACHINERY

_REPLAY = Replay.run_node.__code__.co_filename
_OWN = (*MACHINERY, "jaxtrain/")
_SYMBOL = re.compile(r"\bs\d+\b")
_shown: set[tuple] = set()


def showing(trace: Callable[[], Any], gm: torch.fx.GraphModule, inputs: Sequence[Any], module: torch.nn.Module) -> Any:
    """Return `trace()`, which runs Dynamo's graph on tensors without numbers; show what it warns of.

    inputs: of the graph, real tensors and numbers, for warnings that name sizes. module: the user's.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trace()
    if any(_SYMBOL.search(str(one.message)) for one in caught):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _run(gm, inputs)
    for one in caught:
        file, line = (one.filename, one.lineno) if one.filename != _REPLAY else _caller()
        if (key := (type(module), re.sub(r"\d+", "", str(one.message)), file, line)) not in _shown:
            _shown.add(key)
            warnings.warn_explicit(one.message, one.category, file, line)
    return result


def _caller() -> tuple[str, int]:
    """Return the user's line that has led here, for code without a line of the user's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _OWN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _run(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Run the graph on tensors of these sizes, and compute nothing."""
    with FakeTensorMode() as fake, torch.no_grad(), one_operator() as mode:
        sizes = [fake.from_tensor(value) if isinstance(value, torch.Tensor) else int(value) for value in inputs]
        Replay(gm, mode, warns=True).run(*sizes)
