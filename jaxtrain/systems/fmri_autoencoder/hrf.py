"""The haemodynamic response, and bringing film, sound, text and volumes onto one time axis."""

import numpy as np

HRF_SECONDS = 32.0
PAD_SECONDS = 10.0  # of the original's alignment
DELAY, UNDERSHOOT, DISPERSION, RATIO = 6.0, 12.0, 0.9, 0.48


def canonical_hrf(tr: float) -> np.ndarray:
    """Glover's response sampled every `tr` seconds for 32 s, largest value 1: float64 [rint(32 / tr)].

    Source: Glover 1999; equals nilearn.glms.first_level.glover_hrf(tr, oversampling=1) / max.
    """
    from scipy.stats import gamma

    times = np.linspace(0, HRF_SECONDS, int(np.rint(HRF_SECONDS / tr)))
    density = lambda delay: gamma.pdf(times, delay / DISPERSION, loc=tr, scale=DISPERSION)
    kernel = density(DELAY) - RATIO * density(UNDERSHOOT)
    return kernel / np.abs(kernel).max()


def convolve(features: np.ndarray, kernel: np.ndarray, mode: str) -> np.ndarray:
    """Convolution along the first axis (time); integer features come back as they are.

    mode: `full` (len + kernel - 1), `same` (centred, as numpy), `causal` (the first len values: the response follows
    its cause). Computed in float64; `full` of one or two axes stays there, everything else keeps its dtype.
    """
    if not np.issubdtype(features.dtype, np.floating):
        return features
    length, taps = len(features), len(kernel)
    flat = features.reshape(length, -1)
    out = np.empty((length + taps - 1, flat.shape[1]))
    for column in range(flat.shape[1]):
        out[:, column] = np.convolve(flat[:, column], kernel)
    start = {"full": 0, "causal": 0, "same": (min(length, taps) - 1) // 2}[mode]
    size = {"full": len(out), "causal": length, "same": max(length, taps)}[mode]
    out = out[start : start + size].reshape(size, *features.shape[1:])
    return out if mode == "full" and features.ndim <= 2 else out.astype(features.dtype)


def respond(features: np.ndarray, tr: float, kind: str = "causal") -> np.ndarray:
    """Convolve features [time, ...] with the hemodynamic response; integer codes come back unchanged.

    kind: `causal` scales the kernel to sum 1, so that a lasting stimulus keeps its value, and delays it, an impulse at
    volume 30 peaking at 34. `original` reproduces the original: largest value 1 (a lasting stimulus grows to 1.8), and
    shifted early by half the kernel, the impulse peaking at 24; two axes give float64.
    """
    if not np.issubdtype(features.dtype, np.floating):
        return features
    kernel = canonical_hrf(tr)
    if kind == "causal":
        return causal(features, kernel / kernel.sum())
    pad = int(np.round(PAD_SECONDS / tr))
    padded = np.pad(features, [(pad, pad)] + [(0, 0)] * (features.ndim - 1))
    start = pad + len(kernel) // 2
    whole = convolve(padded.reshape(len(padded), -1), kernel, "full")[start : start + len(features)]
    whole = whole.reshape(features.shape)
    return whole if features.ndim <= 2 else whole.astype(features.dtype)


def causal(features: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Causal convolution of wide features, tap by tap in float32: [time, ...] as large as a film."""
    out = np.zeros(features.shape, features.dtype)
    for lag, weight in enumerate(kernel[: len(features)]):
        if weight:
            out[lag:] += features.dtype.type(weight) * features[: len(features) - lag]
    return out


def resample(features: np.ndarray, length: int) -> np.ndarray:
    """Features [time, ...] at `length` evenly spaced times from first to last: linear, whole numbers nearest."""
    size = len(features)
    if size == length:
        return features
    positions = np.linspace(0, size - 1, length)
    if not np.issubdtype(features.dtype, np.floating):
        return features[np.round(positions).astype(int)]
    low = np.minimum(np.floor(positions).astype(int), size - 1)
    high = np.minimum(low + 1, size - 1)
    share = (positions - low).reshape(-1, *(1,) * (features.ndim - 1))
    return (features[low] * (1 - share) + features[high] * share).astype(features.dtype)


def align(stimuli: dict[str, np.ndarray], fmri: np.ndarray, tr: float, hrf: str | None) -> dict[str, np.ndarray]:
    """Stimuli resampled to the shortest of the four lengths, fMRI [time, voxel] cut to it; then the response.

    hrf: `causal`, `original`, or None for none.
    """
    length = min(len(fmri), *(len(value) for value in stimuli.values()))
    aligned = {name: resample(value, length) for name, value in stimuli.items()}
    if hrf is not None:
        aligned = {name: respond(value, tr, hrf) for name, value in aligned.items()}
    return {**aligned, "fmri": fmri[:length]}
