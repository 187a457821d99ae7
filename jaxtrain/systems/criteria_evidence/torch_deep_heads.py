"""Pooling and heads of the model family `architectures` in torch."""

from collections.abc import Sequence

import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.architecture_models import ACTIVATIONS, hidden_widths

POOLINGS = ("cls", "mean", "max", "attn")
Hidden = int | Sequence[int] | None
MODULES = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}


class SequencePooler(nn.Module):
    """Pooling of hidden states [batch, token, width] to [batch, width]: cls, mean, max or attn (learned attention).

    Raises UserError for another pooling.
    """

    def __init__(self, hidden_size: int, pooling: str = "cls"):
        super().__init__()
        if pooling not in POOLINGS:
            raise UserError(f"Unsupported pooling '{pooling}'")
        self.hidden_size, self.pooling = hidden_size, pooling
        if pooling == "attn":
            self.attention = nn.Linear(hidden_size, 1)

    def forward(self, hidden_states, attention_mask=None, pooler_output=None) -> torch.Tensor:
        """Return the pooled vectors; `cls` is pooler_output if it is given, else the first token.

        A text without visible tokens gives zeros (mean, attn) or the dtype's lowest number (max), never NaN.
        """
        if self.pooling == "cls":
            return hidden_states[:, 0] if pooler_output is None else pooler_output
        mask = torch.ones_like(hidden_states[..., 0]) if attention_mask is None else attention_mask
        lowest = torch.finfo(hidden_states.dtype).min
        weight = mask.to(hidden_states.dtype)
        if self.pooling == "mean":
            return (hidden_states * weight[..., None]).sum(1) / weight.sum(1, keepdim=True).clamp(min=1e-6)
        if self.pooling == "max":
            return hidden_states.masked_fill((mask == 0)[..., None], lowest).max(dim=1).values
        share = self.attention(hidden_states)[..., 0].masked_fill(mask == 0, lowest).softmax(1) * weight
        share = share / (share.sum(1, keepdim=True) + 1e-9)
        return (share[..., None] * hidden_states).sum(1)


def hidden_stack(width: int, layers: int, hidden: Hidden, activation: str, dropout: float) -> tuple[nn.Module, int]:
    """Return (Linear, activation, dropout) x (layers - 1) and its output width; arguments as in hidden_widths."""
    widths = hidden_widths(width, layers, hidden, activation)
    parts: list[nn.Module] = []
    for before, after in zip([width, *widths], widths, strict=False):
        parts += [nn.Linear(before, after), MODULES[ACTIVATIONS[activation]](), nn.Dropout(dropout)]
    return (nn.Sequential(*parts), widths[-1]) if widths else (nn.Identity(), width)


class ClassificationHead(nn.Module):
    """Classifier: `ffn` of (Linear, activation, dropout) x (layers - 1), then dropout, then the Linear `out`.

    Raises UserError, a ValueError, for layers < 1, a list of another length or an unknown activation.
    """

    def __init__(
        self,
        input_dim: int,
        num_labels: int,
        layers: int = 1,
        hidden: Hidden = None,
        activation: str = "gelu",
        dropout: float = 0.1,
    ):
        super().__init__()
        self.input_dim, self.num_labels, self.activation = input_dim, num_labels, activation
        self.ffn, width = hidden_stack(input_dim, layers, hidden, activation, dropout)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, num_labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.dropout(self.ffn(x)))


class SpanPredictionHead(nn.Module):
    """Span head: the hidden stack `layers`, then dropout and `out_proj` to start and end logits [batch, token]."""

    def __init__(
        self,
        input_dim: int,
        layers: int = 1,
        hidden: Hidden = None,
        activation: str = "gelu",
        dropout: float = 0.1,
    ):
        super().__init__()
        self.input_dim, self.activation = input_dim, activation
        self.layers, width = hidden_stack(input_dim, layers, hidden, activation, dropout)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.out_proj(self.dropout(self.layers(x))).unbind(-1)
        return start, end
