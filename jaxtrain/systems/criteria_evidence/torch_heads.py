"""Heads of the model family `project` in torch."""

from collections.abc import Sequence

import torch
from torch import nn

from jaxtrain.systems.criteria_evidence.project_models import hidden_widths

Hidden = Sequence[int] | None


class ClassificationHead(nn.Module):
    """Classifier: dropout -> [Linear -> GELU -> dropout] x (layer_num - 1) -> output_layer.

    hidden_dims: widths of the hidden layers, input_dim for each by default. Raises UserError, a ValueError, if there
    are not layer_num - 1 of them.
    """

    def __init__(
        self,
        input_dim: int,
        num_labels: int,
        dropout_prob: float = 0.1,
        layer_num: int = 1,
        hidden_dims: Hidden = None,
    ):
        super().__init__()
        widths = hidden_widths(input_dim, layer_num, hidden_dims)
        self.input_dim, self.num_labels, self.layer_num = input_dim, num_labels, layer_num
        self.dropout_prob, self.hidden_dims = dropout_prob, widths
        self.dropout = nn.Dropout(dropout_prob)
        parts: list[nn.Module] = []
        for before, width in zip([input_dim, *widths], widths, strict=False):
            parts += [nn.Linear(before, width), nn.GELU(), nn.Dropout(dropout_prob)]
        self.hidden_layers = nn.Sequential(*parts)
        self.output_layer = nn.Linear([input_dim, *widths][-1], num_labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.hidden_layers(self.dropout(x)))


class SpanPredictionHead(nn.Module):
    """Span head: [batch, token, width] -> start and end logits [batch, token]; channel 0 of `linear` is the start."""

    def __init__(self, hidden_size: int, dropout: float = 0.1):
        super().__init__()
        self.hidden_size = hidden_size
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(hidden_size, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.linear(self.dropout(x)).unbind(-1)
        return start, end
