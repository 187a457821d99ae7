"""The original's functions of the haemodynamic response and of alignment, with its numbers, faults included.

A run convolves causally (`data.hrf`); these are for scripts that prepare their arrays themselves.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import hrf

MODALITIES = ("video", "audio", "text")


def get_canonical_hrf(tr: float = 1.5, duration: float = hrf.HRF_SECONDS) -> np.ndarray:
    """Return Glover's response sampled every `tr` seconds for `duration` seconds, largest value 1, float64."""
    return hrf.canonical_hrf(tr, duration)


def get_hrf_peak_latency(tr: float = 1.5) -> float:
    """Return the time of the response's largest value in seconds."""
    return float(np.argmax(hrf.canonical_hrf(tr)) * tr)


def apply_hrf(features: np.ndarray, tr: float = 1.5, mode: str = "same") -> np.ndarray:
    """Convolve features [time, ...] with the response; mode `same` or `full` as in numpy, or `causal`.

    Integer codes come back unchanged. Raises ValueError for another mode.
    """
    if mode not in ("same", "full", "causal"):
        raise UserError(f"mode: {mode!r}, wanted same, full or causal")
    return hrf.convolve(np.asarray(features), hrf.canonical_hrf(tr), mode)


def convolve_with_padding(
    features: np.ndarray, tr: float = 1.5, padding_duration: float = hrf.PAD_SECONDS
) -> np.ndarray:
    """Convolve features [time, ...], padded with zeros for padding_duration seconds, as the original's alignment does.

    The response comes early by half the kernel, as there: an impulse at volume 30 peaks at 24. Two axes give float64;
    integer codes come back unchanged.
    """
    return hrf.respond(np.asarray(features), tr, "original", padding_duration)


def align_all_modalities(
    video_features: np.ndarray,
    audio_features: np.ndarray,
    text_features: np.ndarray,
    fmri_features: np.ndarray,
    apply_hrf_conv: bool = True,
    tr: float = 1.5,
    hrf_padding_duration: float = hrf.PAD_SECONDS,
) -> dict[str, Any]:
    """Bring film, sound and text to the shortest of the four lengths, and convolve them if asked.

    Returns video, audio, text and fmri, each [volume, ...], and n_trs.
    """
    stimuli = dict(zip(MODALITIES, (video_features, audio_features, text_features), strict=True))
    aligned = hrf.align(stimuli, fmri_features, tr, None)
    if apply_hrf_conv:
        aligned |= {name: convolve_with_padding(aligned[name], tr, hrf_padding_duration) for name in MODALITIES}
    return {**aligned, "n_trs": len(aligned["fmri"])}


def get_alignment_info(alignment_result: Mapping[str, Any]) -> dict[str, Any]:
    """Return n_trs, and the shape and dtype of each modality of a result of `align_all_modalities`."""
    parts = {name: alignment_result[name] for name in (*MODALITIES, "fmri")}
    described = {name: {"shape": part.shape, "dtype": str(part.dtype)} for name, part in parts.items()}
    return {"n_trs": alignment_result["n_trs"], **described}
