"""Record two implementations of one computation layer by layer and measure how far their outputs differ."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from torch_bridge import layouts
from torch_bridge.datasets import to_numpy

Records = list[tuple[str, list[np.ndarray]]]
OUTPUTS, GRADIENTS = 1e-4, 1e-3  # accepted relative L2: what float32 rounding may reach over many layers


@dataclasses.dataclass(frozen=True)
class Difference:
    """Result of one comparison. size: relative L2 distance. limit: the largest distance accepted."""

    kind: str  # "output", "loss" or "gradient"
    name: str
    size: float
    limit: float

    @property
    def departs(self) -> bool:
        return not self.size <= self.limit  # NaN departs

    def __str__(self) -> str:
        return f"{self.kind:9s}{self.size:10.1e}  {self.name}" + ("   <-- departs" if self.departs else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """All differences: layers in the order in which they finish, the loss, gradients from the last layer to the
    first."""

    differences: list[Difference]
    unmatched: list[str]  # layers that only one side has, or whose outputs have other shapes

    @property
    def first(self) -> Difference | None:
        return next((difference for difference in self.differences if difference.departs), None)

    def __str__(self) -> str:
        lines = [str(difference) for difference in self.differences]
        if self.unmatched:
            more = ", ..." if len(self.unmatched) > 6 else ""
            lines.append(
                f"not compared, because the two sides are built otherwise: {', '.join(self.unmatched[:6])}{more}"
            )
        counts = {kind: sum(d.kind == kind for d in self.differences) for kind in ("output", "loss", "gradient")}
        compared = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
        if self.first is None:
            return "\n".join([*lines, f"all agree: {compared}"])
        first = self.first
        sizes = f"relative difference {first.size:.1e}, accepted {first.limit:.0e}"
        words = f"the {first.kind} of {first.name} departs first: {sizes}"
        return "\n".join([*lines, words])


@contextlib.contextmanager
def recording_flax(model: nnx.Module) -> Iterator[Records]:
    """Collect the outputs of all layers called inside the context, in the order in which they finish.

    Layers that run inside a JAX transformation (scan, remat) have traced outputs and are left out.
    """
    names: dict[int, str] = {}
    _name_modules(model, (), names)
    classes = {type(module) for module in modules(model) if callable(module)}
    originals = {kind: (kind.__call__, "__call__" in vars(kind)) for kind in classes}
    records: Records = []
    active: set[int] = set()

    def recorded(original):
        def call(self, *args, **kwargs):
            if id(self) not in names or id(self) in active:
                return original(self, *args, **kwargs)
            active.add(id(self))
            try:
                outputs = original(self, *args, **kwargs)
            finally:
                active.discard(id(self))
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(outputs)):
                records.append((names[id(self)], arrays_of(outputs)))
            return outputs

        return call

    for kind, (original, _) in originals.items():
        kind.__call__ = recorded(original)
    try:
        yield records
    finally:
        for kind, (original, own) in originals.items():
            if own:
                kind.__call__ = original
            else:
                del kind.__call__


@contextlib.contextmanager
def recording_torch(module: torch.nn.Module) -> Iterator[Records]:
    """Collect the outputs of all layers called inside the context, in the order in which they finish."""
    records: Records = []

    def hook(name):  # copies: a later layer may write in place
        return lambda layer, inputs, outputs: records.append((name, [*map(np.array, arrays_of(to_numpy(outputs)))]))

    handles = [layer.register_forward_hook(hook(name)) for name, layer in module.named_modules() if name]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _name_modules(module: nnx.Pytree, path: tuple, names: dict[int, str]) -> None:
    for name, value in layouts.children(module):
        if isinstance(value, nnx.Pytree):
            names.setdefault(id(value), layouts.key_of((*path, name)))
            _name_modules(value, (*path, name), names)


def modules(module: nnx.Pytree) -> Iterator[nnx.Pytree]:
    """Yield every module inside this one, at any depth."""
    for _, value in layouts.children(module):
        if isinstance(value, nnx.Pytree):
            yield value
            yield from modules(value)


def arrays_of(outputs: Any) -> list[np.ndarray]:
    """Return all arrays in nested dicts, lists and tuples."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(outputs) if hasattr(leaf, "shape")]


def distances(ours: Records, theirs: Records, valid: np.ndarray, unmatched: dict) -> Iterator[tuple[str, float]]:
    """Yield (layer, distance) for layers that both sides have. The n-th call of a name is compared with the n-th call
    on the other side."""
    calls: dict[str, list[list[np.ndarray]]] = {}
    for name, arrays in theirs:
        calls.setdefault(name, []).append(arrays)
    counts: dict[str, int] = {}
    for name, arrays in ours:
        counts[name] = counts.get(name, 0) + 1
        label = name if counts[name] == 1 else f"{name}, call {counts[name]}"
        other = calls[name].pop(0) if calls.get(name) else None
        if other is None or [a.shape for a in arrays] != [b.shape for b in other]:
            unmatched[name] = None
        elif arrays:
            yield label, max(distance(_rows(a, valid), _rows(b, valid)) for a, b in zip(arrays, other, strict=True))
    unmatched |= {name: None for name, left in calls.items() if left}


def _rows(array: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return array[valid] if array.shape[:1] == valid.shape else array


def distance(ours: np.ndarray, theirs: np.ndarray, scale: float = 0.0) -> float:
    """Return the L2 distance relative to the larger of the norm of `theirs` and `scale`. NaN at the same place on both
    sides counts as equal."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    both = np.isnan(ours) & np.isnan(theirs) | (ours == theirs)
    size = np.linalg.norm(np.where(both, 0, ours - theirs))
    return float(size / max(np.linalg.norm(np.where(np.isfinite(theirs), theirs, 0)), scale, 1e-12))
