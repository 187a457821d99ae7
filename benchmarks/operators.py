"""Compare torch_bridge.from_torch with torch over torch's own operator database (OpInfo), values and gradients.

    pip install expecttest scipy
    python -m benchmarks.operators --only add,linalg.svd

The first three float32 samples of every operator are called as a module's forward. One operator counts as

    equal    every sample has torch's shapes, dtypes and numbers to 1e-4 (or lies as near to torch's float64 result as
             torch's float32 does, times 4); of operators that draw random numbers shapes and dtypes count
    refused  from_torch raised UnsupportedModel or an operator NoForm
    wrong    a number differs and nobody said so
    crashed  any other exception
    none     torch itself has no result, or no gradient

zeros and round put such numbers in place of the drawn ones, where gradients have corners, ties and poles; an element
counts there only where torch's float32 and float64 agree. A file that exists is continued.
"""

import collections
import itertools
import json
import logging
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

from benchmarks import parser
from torch_bridge.datasets import to_numpy
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel
from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.lowering.errors import NoForm

SAMPLES = 3
ORDER = ("wrong", "crashed", "refused", "equal", "none")  # an operator is as bad as its worst sample


class Call(torch.nn.Module):
    """One call of an operator; its tensors are what forward takes."""

    def __init__(self, operator, sample):
        super().__init__()
        self.function, self.process = operator.op, sample.output_process_fn_grad
        leaves, self.spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[i].detach().clone() for i in self.places] or [torch.zeros(2, 3)]
        self.moving = [i for i, place in enumerate(self.places) if leaves[place].requires_grad]
        self.rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors):
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=False):
            leaves[place] = tensor
        given, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.process(self.function(given, *args, **kwargs))


def flat(value: Any) -> list:
    value = tuple(value.values()) if isinstance(value, dict) else value  # named results
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def other_values(tensor: torch.Tensor, values: str) -> torch.Tensor:
    if values == "drawn" or not tensor.is_floating_point():
        return tensor
    return torch.zeros_like(tensor) if values == "zeros" else (tensor * 1.5).round().clamp(-1, 2)


def numbers(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = to_numpy(value.detach().resolve_conj().resolve_neg())
    value = np.asarray(value)
    value = value.astype(np.float32) if value.dtype == jnp.bfloat16 else value
    return value.astype({"c": np.complex128, "f": np.float64}.get(value.dtype.kind, value.dtype))


def chance(first: list, second: list) -> bool:
    """Return True if two calls of torch differ."""
    pairs = ((a, b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor))
    return any(not np.array_equal(numbers(a), numbers(b), equal_nan=numbers(a).dtype.kind in "fc") for a, b in pairs)


def differs(ours: list, theirs: list, exact: list, sure: bool) -> bool:
    """Return True if some number is not torch's. exact: torch's in float64. sure: where those two agree only."""
    if len(ours) != len(theirs):
        return True
    for mine, other, best in zip(ours, theirs, exact, strict=True):
        if not isinstance(other, torch.Tensor):
            continue
        if tuple(mine.shape) != tuple(other.shape) or jnp.dtype(mine.dtype) != jax_dtype(other.dtype):
            return True
        a, b, c = numbers(mine), numbers(other), numbers(best)
        with np.errstate(all="ignore"):
            if sure:
                bad = np.isclose(b, c, 1e-3, 1e-5) & np.isfinite(b) & ~np.isclose(a, b, 1e-3, 1e-5)
                if np.any(bad):
                    return True
            elif not np.allclose(a, b, 1e-4, 1e-5, equal_nan=True):
                near = np.nanmax(np.abs(a - c), initial=0) <= 4 * np.nanmax(np.abs(b - c), initial=0)
                if not near or np.any(np.isfinite(a) != np.isfinite(b)):
                    return True
    return False


def slopes_of(call: Call, tensors: list[torch.Tensor], weights: list) -> list[torch.Tensor]:
    """torch's gradients of a weighted sum of all floating results. weights: filled in once."""
    moving = [tensors[i].requires_grad_() for i in call.moving]
    results = [y for y in flat(call(*tensors)) if isinstance(y, torch.Tensor) and y.requires_grad]
    if not weights:
        rng = np.random.default_rng(0)
        weights += [rng.normal(size=tuple(y.shape)) for y in results]
    total = sum((torch.from_numpy(np.asarray(w)) * y).sum().real for w, y in zip(weights, results, strict=True))
    found = torch.autograd.grad(total, moving, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(moving, found, strict=True)]


def values_of(call: Call, tensors: list[torch.Tensor], weights: list) -> list:
    with torch.no_grad():
        return flat(call(*tensors))


def ours_of(call: Call, tensors: list[torch.Tensor], gradient: bool, weights: list) -> list:
    model = from_torch(call.eval(), tuple(x.detach() for x in tensors), modes=("evaluation",))
    arrays = [jnp.asarray(to_numpy(x.detach())) for x in tensors]
    if not gradient:
        return [y if y is None else np.asarray(y) for y in flat(jax.jit(lambda xs: model(*xs))(arrays))]

    def loss(moving):
        given = dict(enumerate(arrays)) | dict(zip(call.moving, moving, strict=True))
        results = [y for y in flat(model(*given.values())) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.asarray(w, jnp.float32) * y).real for w, y in zip(weights, results, strict=False))

    return [np.conj(slope) for slope in jax.jit(jax.grad(loss))([arrays[i] for i in call.moving])]


def judge(operator, sample, gradient: bool, values: str) -> str:
    call, weights = Call(operator, sample), []
    theirs_of = slopes_of if gradient else values_of
    fresh = lambda wide: [
        x.double() if wide and x.dtype == torch.float32 else x.clone()
        for x in (other_values(tensor, values) for tensor in call.tensors)
    ]
    if gradient and not call.moving:
        return "none"
    try:
        torch.manual_seed(0)
        theirs = theirs_of(call, fresh(False), weights)
        drawn = [values_of(call, fresh(False), []) for _ in range(2)]
    except Exception:  # torch itself has no answer
        return "none"
    try:
        ours = ours_of(call, fresh(False), gradient, weights)
    except (UnsupportedModel, NoForm):
        return "refused"
    except Exception:
        return "crashed"
    if chance(*drawn):
        return "equal" if [y.shape for y in ours] == [tuple(y.shape) for y in theirs] else "wrong"
    try:
        exact = theirs_of(call, fresh(True), weights)
    except Exception:
        exact = theirs
    return "wrong" if differs(ours, theirs, exact, values != "drawn") else "equal"


def run(operator, gradient: bool, values: str) -> str:
    if gradient and not operator.supports_autograd:
        return "none"
    torch.manual_seed(0)
    np.random.seed(0)
    samples = list(itertools.islice(operator.sample_inputs("cpu", torch.float32, requires_grad=gradient), SAMPLES))
    strided = [s for s in samples if not isinstance(s.input, torch.Tensor) or s.input.layout == torch.strided]
    return min((judge(operator, sample, gradient, values) for sample in strided), key=ORDER.index, default="none")


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--values", nargs="+", default=["drawn", "zeros", "round"], choices=["drawn", "zeros", "round"])
    p.add_argument("--only", default="", help="names of operators, by commas")
    p.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/operators.json"))
    arguments = p.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    database.wrapper_set_seed = lambda call, *args, **kwargs: call(*args, **kwargs)  # else no two calls differ
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    only = set(filter(None, arguments.only.split(",")))
    for values, gradient in itertools.product(arguments.values, (False, True)):
        key = f"{'gradient' if gradient else 'forward'}, {values}"
        found = results.setdefault(key, {})
        for number, operator in enumerate(database.op_db):
            name = operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")
            if name in found or (only and name not in only) or not operator.supports_dtype(torch.float32, "cpu"):
                continue
            found[name] = run(operator, gradient, values)
            arguments.json.write_text(json.dumps(results, indent=1))
            if number % 15 == 0:
                jax.clear_caches()
        counts = collections.Counter(found.values())
        print(key, dict(counts), *(f"{name}: {kind}" for name, kind in found.items() if kind in ("wrong", "crashed")))


if __name__ == "__main__":
    main()
