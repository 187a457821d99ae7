"""Recurrent layers as operators whose forward and backward stay together, each a scan over time.

While torch traces, nn.LSTM becomes a kernel of its CPU library, whose halves belong together, or as many operators as
there are time steps. While `one_operator` is on, each of its layers is one of these operators instead.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_FUNCTIONS: dict[str, Callable] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
KINDS = {function: kind for kind, function in _FUNCTIONS.items()}


def takes(arguments: Sequence[Any]) -> bool:
    """Return True for the arguments of a layer that these operators compute as torch does: tensors of one floating
    dtype outside of autocast, and no packed sequence."""
    if len(arguments) != 9 or type(arguments[3]) is not bool:  # a packed sequence comes with its sizes
        return False
    x, hx, params = arguments[:3]
    tensors = [x, *(hx if isinstance(hx, (tuple, list)) else [hx]), *params]
    alike = len({tensor.dtype for tensor in tensors}) == 1 and x.is_floating_point()
    return alike and not torch.is_autocast_enabled(x.device.type)


def layers(kind: str, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first) -> tuple:
    """Compute as torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu do: (outputs, *last states)."""
    states = list(hx) if kind == "LSTM" else [hx]
    directions = 2 if bidirectional else 1
    count = len(params) // num_layers
    last: list[list[Tensor]] = []
    for layer in range(num_layers):
        if layer and dropout and train:
            x = F.dropout(x, dropout, True)
        begin = [state[layer * directions : (layer + 1) * directions] for state in states]
        weights = list(params[layer * count : (layer + 1) * count])
        x, *ends = torch.ops.torch_bridge.recurrent(kind, x, begin, weights, has_biases, bidirectional, batch_first)
        last.append(ends)
    return (x, *(torch.cat(ends) for ends in zip(*last, strict=True)))


@torch.library.custom_op("torch_bridge::recurrent", mutates_args=())
def recurrent(
    kind: str, x: Tensor, states: list[Tensor], params: list[Tensor], has_biases: bool, both: bool, batch_first: bool
) -> list[Tensor]:
    """Compute one layer, in both directions if `both`; return its outputs and its last states."""
    outputs = _torchs(kind, x, states, params, has_biases, both, batch_first)
    return [output.clone(memory_format=torch.contiguous_format) for output in outputs]


def _torchs(kind, x, states, params, has_biases, both, batch_first) -> tuple[Tensor, ...]:
    hx = tuple(states) if kind == "LSTM" else states[0]
    return _FUNCTIONS[kind](x, hx, params, has_biases, 1, 0.0, False, both, batch_first)


@recurrent.register_fake
def _(kind, x, states, params, has_biases, both, batch_first):
    width = states[0].shape[-1] * (2 if both else 1)
    return [x.new_empty((*x.shape[:-1], width)), *(state.new_empty(state.shape) for state in states)]


@torch.library.custom_op("torch_bridge::recurrent_backward", mutates_args=())
def recurrent_backward(
    kind: str,
    slopes: list[Tensor],
    x: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    both: bool,
    batch_first: bool,
) -> list[Tensor]:
    """Return the gradients of x, of the states and of the parameters."""

    def gradients() -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *states, *params)]
        begin, weights = leaves[1 : 1 + len(states)], leaves[1 + len(states) :]
        outputs = _torchs(kind, leaves[0], begin, weights, has_biases, both, batch_first)
        return [grad.contiguous() for grad in torch.autograd.grad(outputs, leaves, slopes)]

    # torch differentiates nothing inside an operator, on this thread
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(gradients).result()


@recurrent_backward.register_fake
def _(kind, slopes, x, states, params, has_biases, both, batch_first):
    return [tensor.new_empty(tensor.shape) for tensor in (x, *states, *params)]


def _keep(ctx, inputs, output) -> None:
    kind, x, states, params, *options = inputs
    ctx.save_for_backward(x, *states, *params)
    ctx.kind, ctx.count, ctx.options = kind, len(states), options


def _pull(ctx, slopes):
    x, *rest = ctx.saved_tensors
    states, params = rest[: ctx.count], rest[ctx.count :]
    if torch.is_grad_enabled():  # create_graph: plain operators, which torch differentiates again
        with torch.backends.mkldnn.flags(enabled=False):
            y = _torchs(ctx.kind, x, states, params, *ctx.options)
        leaves = [x, *rest]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        of_trained = iter(torch.autograd.grad(y, trained, slopes, create_graph=True))
        grads = [next(of_trained) if leaf.requires_grad else None for leaf in leaves]
    else:
        grads = torch.ops.torch_bridge.recurrent_backward(ctx.kind, slopes, x, states, params, *ctx.options)
    return None, grads[0], list(grads[1 : 1 + ctx.count]), list(grads[1 + ctx.count :]), None, None, None


recurrent.register_autograd(_pull, setup_context=_keep)
