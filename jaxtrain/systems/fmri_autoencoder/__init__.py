"""The Sherlock autoencoders: predict brain activity from film, sound and text, and reconstruct the film."""

from jaxtrain.lazy import lazy, lazy_attributes
from jaxtrain.systems.fmri_autoencoder.config import Data, Gen1Options, HeadOptions, LesionOptions, LossOptions
from jaxtrain.systems.fmri_autoencoder.data import build_data, example
from jaxtrain.systems.fmri_autoencoder.losses import loss, outputs
from jaxtrain.systems.fmri_autoencoder.metrics import compute, eval_statistics
from jaxtrain.systems.fmri_autoencoder.model import build_model
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import ORIGINAL
from jaxtrain.systems.fmri_autoencoder.original.schedules import schedule
from jaxtrain.task import Task, TorchTwin

COMMON = {
    "build_model": build_model,
    "build_data": build_data,
    "example": example,
    "loss": loss,
    "outputs": outputs,
    "eval_statistics": eval_statistics,
    "compute": compute,
    "schedule": schedule,
    "report": lazy("jaxtrain.systems.fmri_autoencoder.evals.report:report"),
    "twin": TorchTwin(
        **{
            name: lazy(f"jaxtrain.systems.fmri_autoencoder.torch_twin:{name}")
            for name in ("build", "call", "loss", "inputs")
        },
        checkpoint=lazy("jaxtrain.systems.fmri_autoencoder.original.torch_files:write"),
    ),
    "couples_samples": True,
    "original": ORIGINAL,
    "traced_hparams": (
        "seed",
        "model.encoder_dropout",
        "model.decoder_dropout",
        *(f"loss.{name}_weight" for name in ("reconstruction", "fmri", "video", "audio", "text")),
    ),
}

SECTIONS = {"loss": LossOptions, "data": Data, "lesion": LesionOptions}

TASKS = {
    "gen1": Task(sections={"model": Gen1Options, **SECTIONS}, **COMMON),
    "head": Task(sections={"model": HeadOptions, **SECTIONS}, **COMMON),
}

ORIGINAL_NAMES = {
    "original.datasets": ("SherlockDataset", "MultimodalDataset"),
    "torch_losses": (
        "ReconstructionLoss",
        "FMRIMatchingLoss",
        "CombinedAutoEncoderLoss",
        "NormalizedReconstructionLoss",
        "NormalizedFMRIMatchingLoss",
        "NormalizedCombinedAutoEncoderLoss",
        "PerceptualLoss",
        "compute_correlation_metric",
        "compute_r2_score",
    ),
    "torch_gen1": ("SherlockAutoencoder", "SherlockDecoder", "SherlockEncoder"),
    "torch_head": (
        "AudioEncoder",
        "MultimodalAutoencoder",
        "MultimodalDecoder",
        "MultimodalEncoder",
        "VideoEncoder",
    ),
    "torch_blocks": ("TextEncoder",),
    "original.alignment": (
        "align_all_modalities",
        "apply_hrf",
        "convolve_with_padding",
        "get_alignment_info",
        "get_canonical_hrf",
        "get_hrf_peak_latency",
    ),
    "original.processors": ("AudioProcessor", "FMRIProcessor", "TextProcessor", "VideoProcessor"),
    "evals.lesions": ("Lesion", "simulate", "effects"),
    "original.legacy_config": ("TrainingConfig",),
    "original.trainer": ("Trainer",),
    "original.torch_compat": (
        "cleanup_distributed",
        "create_autoencoder",
        "create_encoder",
        "create_model_summary",
        "prepare_for_distributed",
        "setup_distributed",
    ),
}
__getattr__ = lazy_attributes(__name__, ORIGINAL_NAMES)
