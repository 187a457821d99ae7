"""Tensors whose length the data decides: `x[mask]`, `nonzero`, `masked_select`, `unique`, and what follows from them.

XLA needs fixed shapes. A selection is held as an array of the greatest length that it can have, its rows first and
copies of the first row after them, beside the number of its rows. Operators along other axes run as they are; those
that reduce the axis leave the copies out. An operator that can do neither is refused by name.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.lowering.selections import picking, reducing, shaping
from torch_bridge.lowering.selections.values import (
    Lengths,
    Selection,
    Site,
    data_axes,
    leaves,
    run,
    shape_of,
    shape_symbols,
    symbols_of,
    unbacked,
    value_of,
)


def concern(node: torch.fx.Node, values: Any) -> bool:
    """Return True if the node takes or makes a selection, or takes the length of one. values: its arguments."""
    return _selects(node) or any(isinstance(leaf, Selection) for leaf in leaves(values)) or bool(shape_symbols(node))


def obstacles(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, str]]:
    """Yield the nodes of a graph whose shapes depend on data and that cannot be computed, each with a sentence."""
    symbols = set().union(*map(shape_symbols, graph.nodes))
    unknown: set[torch.fx.Node] = set()
    for node in graph.nodes if symbols else ():
        values = [value_of(node), *map(value_of, node.all_input_nodes)]
        found = [symbols_of(v) for v in pytree.tree_leaves(values) if isinstance(v, torch.SymInt)]
        given = set().union(*map(shape_symbols, node.all_input_nodes))
        if not symbols & set().union(given, shape_symbols(node), *found):
            continue
        if unknown & set(node.all_input_nodes):
            unknown.add(node)  # follows from a node already reported
        elif node.op == "output" and given:
            yield node, "it returns a tensor whose shape depends on the values of another"
        elif node.op == "call_function" and _way(node) is None:
            unknown.add(node)
            makes = shape_symbols(node) - given
            many = f"{node.target} of a tensor whose shape depends on the values of another"
            yield node, f"the shape of {node.target}'s result depends on the values of a tensor" if makes else many


def makes(node: torch.fx.Node) -> bool:
    """Return True if the node is an operator that selects by values, and that can be computed."""
    return _selects(node) and _way(node) is not None


def _selects(node: Any) -> bool:
    name = str(node.target)
    if name in _PRODUCERS:
        return True
    masks = [value_of(index) for index in node.args[1]] if name == "aten.index.Tensor" else []
    return any(mask is not None and mask.dtype is torch.bool for mask in masks)


def compute(node: torch.fx.Node, args: tuple, kwargs: Mapping[str, Any], lower: Callable) -> Any:
    """Return the node's value. lower: the operator's lowering, called as lower(args, kwargs) on plain arrays."""
    lengths: Lengths = {}
    for leaf in leaves((args, kwargs)):
        if getattr(leaf, "dtype", None) == np.int64:
            raise NotImplementedError(f"{node.target} of a selection of integers that may leave 32 bits")
        for name, length in leaf.lengths.items() if isinstance(leaf, Selection) else ():
            if lengths.setdefault(name, length)[0] != length[0]:
                raise NotImplementedError(f"{node.target} of selections from tensors of unlike lengths")
    if not isinstance(node.target, torch._ops.OpOverload):
        return shaping.compute_size(node, args, lengths)
    way = _way(node)
    if way is None:
        raise NotImplementedError(f"{node.target} of a selection whose length depends on the data")
    return way(Site(node, lengths, lower), *args, **kwargs)


def _way(node: torch.fx.Node) -> Callable | None:
    """Return how to compute the node: a function of (site, *args, **kwargs); None if it cannot be computed."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return run if node.target in shaping.ON_SIZES or node.target is operator.getitem else None
    name = str(node.target).split(".")[1]
    values = [value for value in pytree.tree_leaves(value_of(node)) if isinstance(value, torch.Tensor)]
    given = [value_of(n) for n in node.all_input_nodes]
    if any("" in data_axes(v).values() for v in [*values, *given]):
        return None
    find = _FINDERS.get(name)
    if find is not None:
        return find(node)
    if torch.Tag.pointwise in node.target.tags or name in _ELEMENTWISE:
        return run if _aligned(node) else None
    return None


def _aligned(node: torch.fx.Node) -> bool:
    """Return True if each argument has the result's size, or 1, along every axis that the data decides."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return False
    wanted = shape_of(value)[::-1]
    for given in (value_of(n) for n in node.all_input_nodes):
        if isinstance(given, torch.Tensor):
            for size, other in zip(shape_of(given)[::-1], wanted, strict=False):
                if size not in (other, 1) and (unbacked(size) or unbacked(other)):
                    return False
    return True


_ELEMENTWISE = set(
    "scalar_tensor _to_copy detach alias lift_fresh_copy full_like zeros_like ones_like empty_like rand_like "
    "randn_like native_dropout dropout bernoulli where masked_fill fill copy contiguous type_as prelu "
    "_prelu_kernel".split()
)


_along, _filled = reducing.find_along, reducing.filling
_FINDERS: dict[str, Callable] = {
    **dict.fromkeys(("index", "_unsafe_index"), picking.find_index),
    "masked_select": picking.find_producer(picking.masked_select),
    "masked_scatter": picking.find_masked_scatter,
    "nonzero": picking.find_producer(picking.nonzero),
    "_unique2": picking.find_producer(picking.unique),
    **dict.fromkeys(("sym_size", "sym_numel"), lambda node: shaping.length_of),
    **dict.fromkeys(("_assert_scalar", "_assert_async", "_assert_tensor_metadata"), lambda node: run),
    **dict.fromkeys(("sym_constrain_range", "sym_constrain_range_for_size"), lambda node: run),
    "sum": _along(1, reducing.filled_with_zero),
    "nansum": _along(1, reducing.filled_with_zero),
    "count_nonzero": _along(1, reducing.filled_with_zero),
    "linalg_vector_norm": reducing.find_vector_norm,
    "any": _along(1, _filled(lambda dtype: 0)),
    "all": _along(1, _filled(lambda dtype: 1)),
    "prod": _along(1, _filled(lambda dtype: 1)),
    **dict.fromkeys(("amax", "max", "argmax"), _along(1, _filled(reducing.lowest, empty_is_nan=True))),
    **dict.fromkeys(("amin", "min", "argmin"), _along(1, _filled(reducing.highest, empty_is_nan=True))),
    "mean": _along(1, reducing.mean),
    "logsumexp": _along(1, _filled(reducing.lowest)),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax"), _along(1, _filled(reducing.lowest, again=True))),
    **dict.fromkeys(("log_softmax", "_log_softmax"), _along(1, _filled(reducing.lowest, again=True))),
    **dict.fromkeys(("cumsum", "logcumsumexp", "cummax", "cummin"), _along(1, run)),
    "cumprod": _along(1, _filled(lambda dtype: 1)),
    **dict.fromkeys(("sort", "argsort", "topk"), reducing.find_order),
    "median": reducing.find_middle,
    "nanmedian": _along(1, _filled(lambda dtype: jnp.nan)),
    "flip": _along(1, shaping.flip),
    **dict.fromkeys(("roll", "glu"), _along(1, None)),
    "var": _along(1, reducing.spread(False, False)),
    "std": _along(1, reducing.spread(True, False)),
    "var_mean": _along(1, reducing.spread(False, True)),
    "std_mean": _along(1, reducing.spread(True, True)),
    **dict.fromkeys(
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
        "soft_margin_loss".split(),
        reducing.find_loss,
    ),
    "nll_loss_forward": reducing.find_nll,
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot"), reducing.find_product((-1, -2))),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), reducing.find_product((-1, -2), first=1)),
    "linear": shaping.find_linear,
    "einsum": reducing.find_einsum,
    **dict.fromkeys(("_cdist_forward", "cdist"), reducing.find_product((-1, -1))),
    **dict.fromkeys("convolution max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d".split(), shaping.find_batch),
    **dict.fromkeys("upsample_bilinear2d upsample_nearest2d group_norm native_group_norm".split(), shaping.find_batch),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), shaping.find_norm),
    "scaled_dot_product_attention": shaping.find_attention,
    "embedding": shaping.find_embedding,
    "one_hot": shaping.find_moved,
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), shaping.find_view),
    "expand": shaping.find_expand,
    "repeat": shaping.find_expand,
    **dict.fromkeys(("permute", "transpose", "t", "numpy_T", "unsqueeze", "squeeze", "movedim"), shaping.find_moved),
    **dict.fromkeys(
        "zeros ones full empty arange eye rand randn new_zeros new_ones new_empty".split(),
        shaping.find_creation,
    ),
    **dict.fromkeys(("slice", "split", "split_with_sizes", "chunk", "narrow"), shaping.find_cut),
    "unbind": _along(1, None),
    **dict.fromkeys(("triu", "tril"), shaping.find_moved),
    "slice_scatter": shaping.find_slice_scatter,
    "diagonal": shaping.find_diagonal,
    **dict.fromkeys(("cat", "stack"), shaping.find_join),
    "select": picking.find_select,
    **dict.fromkeys(("index_put", "_unsafe_index_put"), picking.find_put),
    **dict.fromkeys(("index_add", "index_copy", "index_fill"), picking.find_add),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), picking.find_scatter),
    "gather": picking.find_gather,
    "index_select": shaping.find_moved,
}


_PRODUCERS = ("aten.masked_select.default", "aten.nonzero.default", "aten._unique2.default")
