"""The names that both generations of the original have, as the first one means them.

The package itself has them as the second generation does; all other names are there alone.
"""

import pathlib
from typing import Any

import numpy as np
import torch

from jaxtrain.lazy import lazy_attributes
from jaxtrain.systems.fmri_autoencoder import audio
from jaxtrain.systems.fmri_autoencoder.original import processors
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


class VideoProcessor(processors.VideoProcessor):
    """The mean frame of every volume, resized by area and flattened as (height, width, RGB), float32."""

    def __init__(self, target_height: int = 90, target_width: int = 160, tr: float = 1.5, normalize: bool = True):
        self._set(target_height, target_width, tr, normalize)


class AudioProcessor(processors.AudioProcessor):
    """Mel decibels below the sound's maximum, averaged over every volume: float32 [volume, mels]."""

    def __init__(
        self,
        sample_rate: int = 22050,
        n_mels: int = 128,
        n_fft: int = 1024,
        hop_length: int = 256,
        tr: float = 1.5,
    ):
        self._set(sample_rate, n_mels, n_fft, hop_length, tr)

    def audio_to_features(
        self, audio_source: str | pathlib.Path, max_trs: int | None = None, from_video: bool = True
    ) -> tuple[np.ndarray, Any]:
        """Return features per volume and the volumes' times. from_video: the volumes are those of the film."""
        count = self._count(audio_source, from_video, self.tr, max_trs)
        decibels = self._decibels(audio_source)
        means = audio.mel_means(decibels, self.tr, count, self.sample_rate, self.hop_length)
        return means, processors.times(count, self.tr)


class TextProcessor(processors.TextProcessor):
    """One embedding per volume of its scene annotations, combined by `aggregation`."""

    def __init__(
        self,
        model_name: str = "BAAI/bge-large-en-v1.5",
        tr: float = 1.5,
        aggregation: str = "mean",
        gap_fill: str = "forward_fill",
        device: str | None = None,
    ):
        super().__init__(model_name, tr, aggregation, gap_fill, device, temporal_mode="average")


class FMRIProcessor(processors.FMRIProcessor):
    """Voxels of every volume as they are recorded."""

    def __init__(self, tr: float = 1.5, max_trs: int | None = None, mask_threshold: float = 0.5):
        super().__init__(tr, max_trs, mask_threshold, normalize=False)

    def features_to_nii(
        self,
        features: np.ndarray,
        coordinates: np.ndarray,
        output_path: str | pathlib.Path,
        template_img: Any = None,
    ) -> Any:
        """Write features [volume, voxel], or of one volume [voxel], as NIfTI; return the nibabel image."""
        return super().features_to_nii(features, coordinates, output_path, template_img)
