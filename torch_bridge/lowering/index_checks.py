"""Indices that torch would refuse: classes, ids and positions of a batch, looked at before the batch is computed with.

XLA reads another row where an index is out of bounds, or none; torch raises IndexError. Indices that follow from the
batch's integers alone are computed once more with torch's own operators, on the host.
"""

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_torch
from torch_bridge.lowering.errors import source_line

log = logging.getLogger(__name__)
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "uniform", "poisson", "dropout", "exponential")


class IndexOutOfBounds(UserError):
    """Names an index of a batch that torch would refuse. row: which of the batch holds it, where that is known."""

    def __init__(self, text: str, row: int | None):
        super().__init__(text)
        self.row = row


@dataclasses.dataclass(frozen=True)
class Bounds:
    """index: the node. An entry is within low (a negative multiple of the size: counted from the end) and size, or it
    is `ignored`."""

    index: torch.fx.Node
    size: Any  # int or torch.SymInt
    what: str
    negative: bool = False
    ignored: int | None = None
    where: str = ""  # the line that uses it


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


def _bounds_of(node: torch.fx.Node) -> list[Bounds]:
    kind = _KINDS.get(str(node.target).removeprefix("aten.").partition(".")[0])
    if kind is None or not isinstance(node.target, torch._ops.OpOverload):
        return []
    where = source_line(getattr(node, "stack_trace", None) or "", own=True)
    found = kind(*node.args, **node.kwargs)
    return [dataclasses.replace(one, where=where) for one in found if isinstance(one.index, torch.fx.Node)]


class IndexChecks:
    """Those of a graph. inputs: its placeholders in the order of the leaves. constants: values of other ones."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[str], constants: Mapping[str, Any]):
        self._inputs, self._constants = tuple(inputs), constants
        self._given = {*inputs, *(name for name, value in constants.items() if isinstance(value, np.ndarray))}
        self._known: dict[torch.fx.Node, bool] = {}
        found = [bounds for node in module.graph.nodes for bounds in _bounds_of(node)]
        self.bounds = [bounds for bounds in found if self._follows(bounds.index)]
        self._program, self._needed = self._copied(module)

    def _follows(self, node: torch.fx.Node) -> bool:
        """Tell whether a node follows from sizes and the integers of batch and constants alone."""
        if node not in self._known:
            self._known[node] = False
            if _is_size(node):
                self._known[node] = True
            elif not _is_integer(node):
                self._known[node] = isinstance(node.meta.get("val"), (list, tuple)) and self._all_follow(node)
            elif node.op == "placeholder":
                self._known[node] = node.name in self._given
            else:
                self._known[node] = self._all_follow(node)
        return self._known[node]

    def _all_follow(self, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and _is_plain(node.target) and all(map(self._follows, node.all_input_nodes))

    def _copied(self, module: torch.fx.GraphModule) -> tuple[Callable, list[torch.fx.Node]]:
        """A function that gives the indices, and the placeholders and sizes that it takes."""
        wanted: set[torch.fx.Node] = set()
        waiting = [bounds.index for bounds in self.bounds]
        while waiting:
            node = waiting.pop()
            if node not in wanted:
                wanted.add(node)
                waiting += [] if _is_size(node) else node.all_input_nodes
        graph, copies, needed = torch.fx.Graph(), {}, []
        for node in module.graph.nodes:
            if node in wanted and (node.op == "placeholder" or _is_size(node)):
                copies[node] = graph.placeholder(node.name)
                needed.append(node)
        for node in module.graph.nodes:
            if node in wanted and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[bounds.index] for bounds in self.bounds])
        return torch.fx.GraphModule({}, graph), needed

    def check(self, leaves: Sequence[Any], symbols: Callable[[], Mapping[Any, int]]) -> None:
        """Raise IndexOutOfBounds. leaves: arrays in host memory or tensors on the CPU; others are not looked at.
        symbols: gives the sizes that the graph leaves open."""
        if not self.bounds:
            return
        known = functools.cache(symbols)
        by_name = dict(zip(self._inputs, leaves, strict=True))
        values = [
            _number(node.meta["val"], known)
            if _is_size(node)
            else _tensor(by_name.get(node.name, self._constants.get(node.name)))
            for node in self._needed
        ]
        if any(value is None for value in values):
            return
        try:
            with torch.no_grad():
                found = self._program(*values)
        except (IndexError, RuntimeError) as error:
            if "out of" in str(error):
                raise IndexOutOfBounds(f"in torch: {type(error).__name__}: {error}", None) from error
            log.warning("indices are not looked at before a step: %s", error)
            self.bounds = []
            return
        for bounds, index in zip(self.bounds, found, strict=True):
            if index.numel():
                _check(bounds, index, known)


def _check(bounds: Bounds, index: torch.Tensor, symbols: Callable[[], Mapping[Any, int]]) -> None:
    size = _number(bounds.size, symbols)
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


def _is_integer(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _number(size: Any, symbols: Callable[[], Mapping[Any, int]]) -> int | None:
    """A size with the open ones put in; None where it depends on values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    found = size.node.expr.subs(symbols())
    return int(found) if found.is_number else None


def _is_plain(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return target in (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)
    return target.namespace in ("aten", "prims") and not any(word in target.name() for word in _RANDOM)


def _tensor(value: Any) -> Any:
    """A leaf as torch's operators take it here; None where it lies on a device."""
    if isinstance(value, jax.Array) and jax.default_backend() == "cpu":
        value = np.asarray(value)
    if isinstance(value, jax.Array) or (isinstance(value, torch.Tensor) and not value.is_cpu):
        return None
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value) if value.dtype.kind in "biuf" and value.flags.writeable else to_torch(value)
    if isinstance(value, torch.Tensor):
        return value.long() if value.dtype is torch.int32 else value
    return value
