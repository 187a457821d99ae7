"""Layers with torch's numerics, torch's parameter layouts and torch's attribute names.

A layer that differs between training and evaluation is called as `layer(x, rngs=rngs)`. `rngs=None` means evaluation
(no dropout; running statistics are used and not updated), a `jaxtrain.runtime.prng.Rngs` means training.
"""

from jaxtrain.nn.activations import ACTIVATIONS, gelu
from jaxtrain.nn.attention import MultiheadAttention, attention, rotary_table, rotate
from jaxtrain.nn.containers import Activation, Sequential
from jaxtrain.nn.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, avg_pool1d
from jaxtrain.nn.dropout import Dropout, DropPath
from jaxtrain.nn.linear import Embedding, Identity, Linear
from jaxtrain.nn.normalization import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from jaxtrain.nn.remat import block
from jaxtrain.nn.rows import pick, rows, tokens
from jaxtrain.runtime.prng import Rngs
from torch_bridge.layouts import Buffer, Carry

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "BatchNorm",
    "Buffer",
    "Carry",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "DropPath",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "Identity",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "Rngs",
    "Sequential",
    "attention",
    "avg_pool1d",
    "block",
    "gelu",
    "pick",
    "rotary_table",
    "rotate",
    "rows",
    "tokens",
]
