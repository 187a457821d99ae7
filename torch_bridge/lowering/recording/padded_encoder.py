"""torch.nn.TransformerEncoder as torch runs it without gradients: nested tensors drop padding, outputs there are 0."""

import torch
from torch.nn import functional as F

_forward = torch.nn.TransformerEncoder.forward


def encoder(fast: bool, graded: bool):
    """Return the encoder's forward for a record. fast: torch's fast path is enabled. graded: autograd may be on."""

    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        padding = src_key_padding_mask
        if not fast or padding is None or mask is not None or src.dim() != 3 or not _nests(self, src, graded):
            return _forward(self, src, mask, padding, is_causal)
        norm, self.norm = self.norm, None
        try:
            output = _forward(self, src, mask, padding, is_causal)
        finally:
            self.norm = norm
        kept = F._canonical_mask(padding, "src_key_padding_mask", None, "", src.dtype).logical_not()
        aligned = (kept[:, 1:] <= kept[:, :-1]).all()  # else torch keeps the padding
        output = output.masked_fill((aligned & ~kept).unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    return forward


def _nests(encoder: torch.nn.TransformerEncoder, src: torch.Tensor, graded: bool) -> bool:
    """Return True if torch would make nested tensors of left-aligned rows. Source: TransformerEncoder.forward."""
    layer = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or layer.training or torch.is_autocast_enabled():
        return False
    attention = layer.self_attn
    read = [src, attention.in_proj_weight, attention.in_proj_bias, *attention.out_proj.parameters()]
    for part in (layer.norm1, layer.norm2, layer.linear1, layer.linear2):
        read += part.parameters()
    return not (graded and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read))
