"""The original's NT-Xent loss. Its value is that of `regularizers.ntxent`."""

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.hjepa.original.loss_module import arrays_too, to_rows, two_views

REDUCTIONS = ("mean", "sum", "none")


class NTXentLoss(nn.Module):
    """Normalised temperature-scaled cross-entropy in nats: row i of both views attract, all others repel.

    Returns loss, accuracy, positive_similarity (over the temperature), negative_similarity (-inf, as in the original).
    reduction: mean, sum or none (float [2 * batch], the rows of z_i first) of the loss. Source: Chen et al. 2020
    (SimCLR).
    """

    def __init__(
        self,
        temperature: float = 0.1,
        use_cosine_similarity: bool = True,
        reduction: str = "mean",
        eps: float = 1e-8,
    ):
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be positive")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is unknown; known: {', '.join(REDUCTIONS)}")
        self.temperature, self.use_cosine_similarity = temperature, use_cosine_similarity
        self.reduction, self.eps = reduction, eps

    @arrays_too
    def forward(self, z_i, z_j, mask=None) -> dict[str, torch.Tensor]:
        """z_i, z_j: [batch, (token,) width]. Raises ValueError for different shapes, and for a mask, which is not
        supported: leave the rows out."""
        _no_mask(mask)
        a, b = (to_rows(x) for x in two_views(z_i, z_j, type(self).__name__))
        if self.use_cosine_similarity:
            a, b = (functional.normalize(x, dim=-1, eps=self.eps) for x in (a, b))
        same = torch.eye(len(a), dtype=torch.bool, device=a.device)
        positive = (a * b).sum(-1) / self.temperature
        logits = []
        for x, y in ((a, b), (b, a)):
            negatives = [(x @ z.T / self.temperature).masked_fill(same, -torch.inf) for z in (x, y)]
            logits.append(torch.cat([positive[:, None], *negatives], dim=1))
        together = torch.cat(logits)
        first = torch.zeros(len(together), dtype=torch.long, device=a.device)
        return {
            "loss": functional.cross_entropy(together, first, reduction=self.reduction),
            "accuracy": (together.argmax(1) == 0).to(a.dtype).mean(),
            "positive_similarity": positive.mean(),
            "negative_similarity": torch.full((), -torch.inf, dtype=a.dtype, device=a.device),
        }

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, use_cosine_similarity={self.use_cosine_similarity}"


def _no_mask(mask) -> None:
    if mask is not None:
        raise ValueError("NTXentLoss: mask is not supported; leave the masked rows out of z_i and z_j")
