"""The names that both generations of the original have, as the first one means them.

The package itself has them as the second generation does; all other names are there alone.
"""

from typing import Any

import torch

from jaxtrain.lazy import lazy_attributes
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder, SherlockEncoder

__getattr__ = lazy_attributes(
    "jaxtrain.systems.fmri_autoencoder",
    {
        "original.alignment": (
            "align_all_modalities",
            "apply_hrf",
            "convolve_with_padding",
            "get_alignment_info",
            "get_canonical_hrf",
            "get_hrf_peak_latency",
        ),
        "original.datasets": ("SherlockDataset",),
        "original.legacy_config": ("TrainingConfig",),
        "original.torch_compat": ("cleanup_distributed", "prepare_for_distributed", "setup_distributed"),
        "original.trainer": ("Trainer",),
        "torch_blocks": ("TextEncoder",),
        "torch_gen1": ("AudioEncoder", "MultimodalDecoder", "VideoEncoder"),
        "torch_losses": (
            "CombinedAutoEncoderLoss",
            "FMRIMatchingLoss",
            "PerceptualLoss",
            "ReconstructionLoss",
            "compute_correlation_metric",
            "compute_r2_score",
        ),
    },
)


def create_autoencoder(
    video_height: int = 90,
    video_width: int = 160,
    audio_mels: int = 128,
    text_dim: int = 1024,
    n_voxels: int = 85810,
    bottleneck_dim: int = 8000,
    reconstruction_weight: float = 1.0,
    fmri_weight: float = 1.0,
    **options: Any,
) -> SherlockAutoencoder:
    """Return a SherlockAutoencoder. options: further ones of the model."""
    sizes = (video_height, video_width, audio_mels, text_dim, n_voxels, bottleneck_dim)
    weights = {"reconstruction_weight": reconstruction_weight, "fmri_weight": fmri_weight}
    return SherlockAutoencoder(*sizes, **weights, **options)


def create_encoder(
    video_height: int = 90,
    video_width: int = 160,
    audio_mels: int = 128,
    text_dim: int = 1024,
    n_voxels: int = 85810,
    bottleneck_dim: int = 8000,
) -> torch.nn.Module:
    """Return a SherlockEncoder under the original's factory name."""
    return SherlockEncoder(video_height, video_width, audio_mels, text_dim, n_voxels, bottleneck_dim)
