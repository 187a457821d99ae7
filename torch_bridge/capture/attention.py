"""Attention as one operator whose forward and backward stay together, so that a fused kernel may compute both.

torch chooses a kernel of its own for scaled_dot_product_attention while it traces; each keeps other numbers for its
backward pass, and taking one half apart gives wrong gradients. While `one_operator` is on, it is this operator instead.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torch_bridge.capture import recurrent


@contextlib.contextmanager
def one_operator() -> Iterator["AsOne"]:
    """Inside the context, scaled_dot_product_attention is torch_bridge.attention, with dropout plain operators; each
    layer of an LSTM, GRU or RNN is torch_bridge.recurrent; one_hot with a number of classes is torch_bridge.one_hot."""
    with AsOne() as mode:
        yield mode


@contextlib.contextmanager
def formula_if_twice(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Inside the context, let torch compute attention by its formula if the graph differentiates a gradient: where a
    function of torch's calls scaled_dot_product_attention itself, no mode sees it, and the second derivative of torch's
    fused kernels is not implemented."""
    modules = [inner for inner in gm.modules() if isinstance(inner, torch.fx.GraphModule)]
    nodes = (node for inner in modules for node in inner.graph.nodes)
    twice = any(node.target is torch.autograd.grad and node.kwargs.get("create_graph") for node in nodes)
    with sdpa_kernel(SDPBackend.MATH) if twice else contextlib.nullcontext():
        yield


class AsOne(TorchFunctionMode):
    """call: what calls torch's functions, as (function, args, kwargs): their warnings name its line."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Callable = lambda function, args, kwargs: function(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in recurrent.KINDS and recurrent.takes(args):
            return recurrent.layers(recurrent.KINDS[func], *args)
        if func is F.one_hot and (counted := _classes(*args, **(kwargs or {}))):
            return torch.ops.torch_bridge.one_hot(*counted)
        if func is not F.scaled_dot_product_attention:
            return self.call(func, args, kwargs or {})
        return _attention(*args, **(kwargs or {}))


def _classes(tensor: Tensor, num_classes: Any = -1) -> tuple[Tensor, int] | None:
    """Return the arguments of one_hot, if they say how many classes there are."""
    counted = isinstance(num_classes, int) and num_classes > 0 and tensor.dtype is torch.int64
    return (tensor, num_classes) if counted else None


@torch.library.custom_op("torch_bridge::one_hot", mutates_args=())
def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """Compute torch's one_hot, whose own graph asserts what `lowering/index_checks.py` checks before the step."""
    return F.one_hot(index, num_classes)


@one_hot.register_fake
def _(index, num_classes):
    return index.new_empty((*index.shape, num_classes))


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    axes = 3 if enable_gqa else 2
    alike = query.shape[:-axes] == key.shape[:-axes] == value.shape[:-axes] and query.is_floating_point()
    if dropout_p or not alike or not query.dtype == key.dtype == value.dtype or query.dim() < 3:
        return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, **options)[0]
    return torch.ops.torch_bridge.attention(query, key, value, attn_mask, *options.values())


@torch.library.custom_op("torch_bridge::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """Compute scaled_dot_product_attention without dropout."""
    y = F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    return y.contiguous() if y.numel() else torch.empty_like(y, memory_format=torch.contiguous_format)


@attention.register_fake
def _(query, key, value, mask, causal, scale, grouped):
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("torch_bridge::attention_backward", mutates_args=())
def attention_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    of_mask: bool,
) -> list[Tensor]:
    """Return the gradients of query, key and value, and of the mask if `of_mask`, by their formulas: torch
    differentiates nothing inside an operator."""
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    q, k, v, g = (x.float() if narrow else x for x in (query, key, value, slope))
    if grouped:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT * factor
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)
    moved = g @ v.mT
    inner = weights * (moved - (moved * weights).sum(-1, keepdim=True))
    found = [inner @ k * factor, inner.mT @ q * factor, weights.mT @ g]
    for place, x in ((1, key), (2, value)) if grouped else ():
        found[place] = found[place].unflatten(-3, (x.shape[-3], -1)).sum(-3)
    leaves = [query, key, value]
    if of_mask and mask is not None:
        found.append(inner.sum_to_size(mask.shape))
        leaves.append(mask)
    return [grad.to(x.dtype).contiguous() for grad, x in zip(found, leaves, strict=True)]


@attention_backward.register_fake
def _(slope, query, key, value, mask, causal, scale, grouped, of_mask):
    return [x.new_empty(x.shape) for x in ((query, key, value, mask) if of_mask else (query, key, value))]


def _keep(ctx, inputs, output) -> None:
    *tensors, causal, scale, grouped = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = causal, scale, grouped


def _pull(ctx, slope):
    query, key, value, mask = ctx.saved_tensors
    of_mask = mask is not None and bool(ctx.needs_input_grad[3])
    if torch.is_grad_enabled():  # create_graph: plain operators, which torch differentiates again
        causal, scale, grouped = ctx.options
        given = [x for x in (query, key, value, mask if of_mask else None) if x is not None]
        y = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )[0]
        wanted = [x for x in given if x.requires_grad]
        slopes = iter(torch.autograd.grad(y, wanted, slope, create_graph=True))
        found = [next(slopes) if x is not None and x.requires_grad else None for x in (query, key, value, mask)]
        return (*found, None, None, None)
    found = torch.ops.torch_bridge.attention_backward(slope, query, key, value, mask, *ctx.options, of_mask)
    return (*found[:3], found[3] if of_mask else None, None, None, None)


attention.register_autograd(_pull, setup_context=_keep)
