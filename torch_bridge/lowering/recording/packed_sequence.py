"""Packed sequences while a module is recorded: they stay padded, and recurrent layers stop at each sequence's length.

torch packs sequences into rows whose number depends on the lengths; JAX needs fixed shapes. A padded sequence keeps its
input's number of steps, so `pad_packed_sequence` returns that many where torch returns the longest length.
"""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import library
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from torch_bridge.lowering.recording.unanswered import refuse

library.define(
    "torch_bridge::packed_rnn",
    "(str kind, Tensor x, Tensor batch_sizes, Tensor[] states, Tensor[] params, bool has_biases, "
    "int num_layers, float dropout, bool train, bool bidirectional) -> Tensor[]",
)


@library.register_fake("torch_bridge::packed_rnn")
def _packed_rnn(kind, x, batch_sizes, states, params, has_biases, num_layers, dropout, train, bidirectional):
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty((*x.shape[:2], width)), *(torch.empty_like(state) for state in states)]


_ROWS = (
    "the rows of a packed sequence and its batch sizes depend on the lengths, so JAX keeps sequences padded: use "
    "pad_packed_sequence and a mask"
)
_READS = (
    "__iter__ __contains__ __add__ __radd__ __mul__ __rmul__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ "
    "__repr__ __str__ __format__ __reduce__ __reduce_ex__ __getnewargs__"
).split()  # of a tuple
_COMPUTES = (
    "__bool__ __len__ __getitem__ __call__ __neg__ __abs__ __float__ __int__ __index__ __sub__ __rsub__ __truediv__ "
    "__rtruediv__ __pow__ __rpow__ __matmul__ __rmatmul__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __and__ __or__"
).split()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    refuse(_ROWS)


class _Unreadable:
    """Item in a padded sequence's tuple in place of its tensors: C code reads the items without asking the tuple."""

    __torch_function__ = classmethod(_refuse)
    __getattr__ = _refuse


class Padded(PackedSequence):
    """Sequences kept padded. data: [time, batch, ...], sorted by length; batch_sizes: int [time], 0 past the end.

    Only torch.nn.utils.rnn and the recurrent layers see this layout: whatever else reads it is refused, by attribute,
    by item or as a tuple.
    """

    layout: tuple[torch.Tensor, torch.Tensor]

    def __new__(cls, data, batch_sizes, sorted_indices=None, unsorted_indices=None):
        made = tuple.__new__(cls, (_UNREADABLE, _UNREADABLE, sorted_indices, unsorted_indices))
        made.layout = data, batch_sizes
        return made

    @property
    def data(self) -> torch.Tensor:
        return self.layout[0] if sys._getframe(1).f_globals is vars(rnn) else _refuse()

    @property
    def batch_sizes(self) -> torch.Tensor:
        return self.layout[1] if sys._getframe(1).f_globals is vars(rnn) else _refuse()

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, key) if key in (2, 3, -2, -1) else _refuse()


_UNREADABLE = _Unreadable()
for _name in _READS:
    setattr(Padded, _name, _refuse)
for _name in (*_READS, *_COMPUTES):
    if not _name.startswith("__reduce"):  # torch copies what it records
        setattr(_Unreadable, _name, _refuse)


class _Kernels:
    """Replacements of the functions of torch._VF that torch.nn.utils.rnn calls."""

    @staticmethod
    def _pack_padded_sequence(x, lengths, batch_first):
        x = x.transpose(0, 1) if batch_first else x
        return x, (lengths[None] > torch.arange(x.shape[0])[:, None]).sum(1)

    @staticmethod
    def _pad_packed_sequence(x, batch_sizes, batch_first, padding_value, width):
        real = torch.arange(x.shape[1])[None] < batch_sizes[:, None]
        x = torch.where(real.reshape(*real.shape, *(1,) * (x.dim() - 2)), x, padding_value)
        if width != x.shape[0]:
            x = torch.cat([x, x.new_full((width - x.shape[0], *x.shape[1:]), padding_value)])
        return (x.transpose(0, 1) if batch_first else x), real.sum(0)


def _init(data, batch_sizes=None, sorted_indices=None, unsorted_indices=None):
    return Padded(*rnn._packed_sequence_init_args(data, batch_sizes, sorted_indices, unsorted_indices))


def _forward(plain):
    """Return a recurrent layer's forward that takes padded sequences too."""

    def forward(self, input, hx=None):
        if not isinstance(input, Padded):
            return plain(self, input, hx)
        (x, batch_sizes), order, back = input.layout, input.sorted_indices, input.unsorted_indices
        states = _states(self, x, hx, order)
        options = (self.bias, self.num_layers, float(self.dropout), self.training, self.bidirectional)
        params = [getattr(self, name) for name in self._flat_weights_names]
        y, *last = torch.ops.torch_bridge.packed_rnn(self.mode, x, batch_sizes, states, params, *options)
        last = tuple(state if back is None else state.index_select(1, back) for state in last)
        return Padded(y, batch_sizes, order, back), last if len(last) == 2 else last[0]

    return forward


def _states(layer, x, hx: Any, order) -> list[torch.Tensor]:
    if hx is not None:
        states = list(hx) if isinstance(hx, tuple) else [hx]
        return states if order is None else [state.index_select(1, order) for state in states]
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 2 if layer.mode == "LSTM" else 1]
    return [x.new_zeros((count, x.shape[1], width)) for width in widths]


def _one_step(plain: Callable) -> Callable:
    """Return torch's rule for the shapes of a recurrent layer, which runs a single step where torch's runs each."""
    thread = threading.get_ident()

    @functools.wraps(plain)
    def layer(inp, hidden, *rest, **options):
        recorded = get_proxy_mode() is not None or threading.get_ident() != thread
        if recorded or not isinstance(inp, FakeTensor):
            return plain(inp, hidden, *rest, **options)
        out, last = plain(inp.sum(0, keepdim=True), hidden, *rest, **options)
        return out.expand(inp.shape[0], *out.shape[1:]).contiguous(), last

    return layer


def swap(stack, put) -> None:
    """Replace what torch.nn.utils.rnn and the recurrent layers do with packed sequences, and multi_margin_loss. Shapes
    of recurrent layers are found in a time that does not grow with the sequence."""
    for name in ("one_layer_lstm", "one_layer_rnn"):
        put(stack, decompositions, name, _one_step(vars(decompositions)[name]))
    put(stack, torch._C._nn, "multi_margin_loss", torch.ops.torch_bridge.multi_margin_loss)
    put(stack, rnn, "_VF", _Kernels)
    put(stack, rnn, "_packed_sequence_init", _init)
    for layer in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU):
        put(stack, layer, "forward", _forward(vars(layer)["forward"]))
