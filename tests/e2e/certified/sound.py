"""An audio codec of snac: residual vector quantization at two rates, without its noise."""

import torch
from snac import SNAC
from torch.nn import functional as F

from tests.e2e.certified import SAMPLES, Certified, rows


def codec():
    module = SNAC(
        encoder_dim=4, encoder_rates=[2, 4], decoder_dim=16, decoder_rates=[4, 2], attn_window_size=None,
        codebook_size=8, codebook_dim=4, vq_strides=[2, 1], noise=False, depthwise=True,
    )  # fmt: skip
    sound = torch.randn(SAMPLES, 1, 128)
    return module, rows(audio_data=sound), lambda output, batch: F.l1_loss(output[0], batch["audio_data"])


MODELS = [Certified("SNAC", codec)]
