"""Check the indices of a batch (classes, ids, positions) before a step, and refuse those that torch would refuse.

XLA reads another row, or none, where an index is out of bounds; torch raises IndexError. Indices that depend only on
the batch's integers are therefore computed a second time with torch's own operators, on the host.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from torch_bridge.lowering.errors import source_line
from torch_bridge.lowering.host_graph import HostPart, HostProgram, Symbols, number

log = logging.getLogger(__name__)


class IndexOutOfBounds(UserError, IndexError):
    """Error for an index of a batch that torch would refuse. row: the row of the batch that holds it, if known."""

    def __init__(self, text: str, row: int | None):
        super().__init__(text)
        self.row = row


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of the node `index`: every entry is at least 0 (-size if `negative`: counted from the end) and below size,
    or is `ignored`."""

    index: torch.fx.Node
    size: Any  # int or torch.SymInt
    what: str
    negative: bool = False
    ignored: int | None = None
    where: str = ""  # the source line that uses the index


def _size(node: Any, axis: int) -> Any:
    shape = node.meta["val"].shape
    return shape[axis] if len(shape) else 1


def _axis(what: str, negative: bool = False) -> Callable:
    def bounds(x, dim, index, *_: Any, **__: Any) -> Iterable[Bounds]:
        yield Bounds(index, _size(x, dim), what, negative)

    return bounds


def _classes(x, target, weight=None, reduction=1, ignore_index=-100, *_: Any, **__: Any) -> Iterable[Bounds]:
    if not target.meta["val"].dtype.is_floating_point:
        yield Bounds(target, _size(x, min(1, x.meta["val"].dim() - 1)), "class", ignored=ignore_index)


def _margin(x, target, *_: Any, **__: Any) -> Iterable[Bounds]:
    yield Bounds(target, _size(x, -1), "class")


def _rows(table, ids, *_: Any, **__: Any) -> Iterable[Bounds]:
    yield Bounds(ids, _size(table, 0), "embedding row")


def _entries(x, indices, *_: Any, **__: Any) -> Iterable[Bounds]:
    for axis, index in enumerate(indices):
        if isinstance(index, torch.fx.Node) and index.meta["val"].dtype is not torch.bool:
            yield Bounds(index, _size(x, axis), "index", negative=True)


def _one_hot(x, num_classes=-1) -> Iterable[Bounds]:
    if not isinstance(num_classes, int) or num_classes > 0:
        yield Bounds(x, num_classes, "class")


_KINDS: dict[str, Callable] = {
    "embedding": _rows,
    "_embedding_bag": _rows,
    "one_hot": _one_hot,
    "multi_margin_loss": _margin,
    "index": _entries,
    "index_put": _entries,
    **dict.fromkeys(
        "cross_entropy_loss nll_loss_nd nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward".split(), _classes
    ),
    **dict.fromkeys(
        "gather index_select index_add index_copy scatter scatter_add scatter_reduce".split(), _axis("index")
    ),
    "index_fill": _axis("index", negative=True),
}


def bounds_of(node: torch.fx.Node) -> list[Bounds]:
    """Return the bounds within which an operator's indices must be, for torch to take them."""
    kind = _KINDS.get(str(node.target).removeprefix("aten.").removeprefix("torch_bridge.").partition(".")[0])
    if kind is None or not isinstance(node.target, torch._ops.OpOverload):
        return []
    where = source_line(getattr(node, "stack_trace", None) or "", own=True)
    found = kind(*node.args, **node.kwargs)
    return [dataclasses.replace(one, where=where) for one in found if isinstance(one.index, torch.fx.Node)]


class IndexChecks:
    """Index checks of a graph.

    inputs: its placeholders in the order of the leaves. constants: values of other placeholders.
    """

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[str], constants: Mapping[str, Any]):
        part = HostPart(module, inputs, constants, _is_integer)
        found = [bounds for node in module.graph.nodes for bounds in bounds_of(node)]
        self.bounds = [bounds for bounds in found if part.has(bounds.index)]
        self._program = HostProgram(part, [bounds.index for bounds in self.bounds])

    def check(self, leaves: Sequence[Any], symbols: Symbols) -> None:
        """Raise IndexOutOfBounds for an index that torch would refuse. leaves: arrays in host memory or CPU tensors;
        nothing is checked if others are needed. symbols: returns the values of the graph's symbolic sizes."""
        if not self.bounds:
            return
        known = functools.cache(symbols)
        values = self._program.arguments(leaves, known)
        if values is None:
            return
        try:
            with torch.no_grad():
                found = self._program.module(*values)
        except (IndexError, RuntimeError) as error:
            if "out of" in str(error):
                raise IndexOutOfBounds(f"in torch: {type(error).__name__}: {error}", None) from error
            log.warning("indices are not looked at before a step: %s", error)
            self.bounds = []
            return
        for bounds, index in zip(self.bounds, found, strict=True):
            if index.numel():
                _check(bounds, index, known)


def _check(bounds: Bounds, index: torch.Tensor, symbols: Symbols) -> None:
    size = number(bounds.size, symbols)
    if size is None:
        return
    low, high = (int(value) for value in index.aminmax())
    least = -size if bounds.negative else 0
    if low >= least and high < size:
        return
    wrong = (index < least) | (index >= size)
    if bounds.ignored is not None:
        wrong &= index != bounds.ignored
    if not bool(wrong.any()):
        return
    place = wrong.nonzero()[0].tolist()
    value = int(index[tuple(place)])
    ignored = "" if bounds.ignored is None else f", or {bounds.ignored}, which is ignored"
    where = f", at {bounds.where}" if bounds.where else ""
    raise IndexOutOfBounds(
        f"the batch holds {bounds.what} {value}, wanted {least} to {size - 1}{ignored}{where}; torch refuses it too",
        place[0] if place else None,
    )


def _is_integer(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())
