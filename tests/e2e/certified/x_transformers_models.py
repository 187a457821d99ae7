"""A decoder of x-transformers with rotary positions, gated feed-forward and RMSNorm."""

from torch.nn import functional as F
from x_transformers import Decoder, TransformerWrapper

from tests.e2e.certified import Certified, rows, tokens


def decoder():
    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
    module = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)
    loss = lambda output, batch: F.cross_entropy(output[:, :-1].transpose(1, 2), batch["x"][:, 1:])
    return module, rows(x=tokens(12)), loss


MODELS = [Certified("Decoder, rotary and GLU", decoder)]
