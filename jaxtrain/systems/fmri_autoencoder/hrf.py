"""Haemodynamic response, and alignment of film, sound, text and volumes on one time axis."""

import numpy as np

HRF_SECONDS = 32.0
PAD_SECONDS = 10.0  # padding in the original's alignment
DELAY, UNDERSHOOT, DISPERSION, RATIO = 6.0, 12.0, 0.9, 0.48


def canonical_hrf(tr: float, seconds: float = HRF_SECONDS) -> np.ndarray:
    """Return Glover's response sampled every `tr` seconds, largest value 1: float64 [rint(seconds / tr)].

    Source: Glover 1999; equals nilearn.glms.first_level.glover_hrf(tr, oversampling=1) / max.
    """
    from scipy.stats import gamma

    times = np.linspace(0, seconds, int(np.rint(seconds / tr)))
    density = lambda delay: gamma.pdf(times, delay / DISPERSION, loc=tr, scale=DISPERSION)
    kernel = density(DELAY) - RATIO * density(UNDERSHOOT)
    return kernel / np.abs(kernel).max()


def convolve(features: np.ndarray, kernel: np.ndarray, mode: str) -> np.ndarray:
    """Convolve features along the first axis (time); integer features are returned unchanged.

    mode: `full` (len + kernel - 1), `same` (centred, as in numpy), `causal` (the first len values: the response follows
    its cause). Computed in float64; `full` results of one or two axes stay float64, all others keep their dtype.
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


def respond(features: np.ndarray, tr: float, kind: str = "causal", pad_s: float = PAD_SECONDS) -> np.ndarray:
    """Convolve features [time, ...] with the hemodynamic response; integer codes come back unchanged.

    kind: `causal` scales the kernel to sum 1, so that a lasting stimulus keeps its value, and delays the response: an
    impulse at volume 30 peaks at 34. `original` reproduces the original: the kernel's largest value is 1 (a lasting
    stimulus grows to 1.8), and the response is early by half the kernel (the impulse peaks at 24); it pads pad_s
    seconds of zeros. Two axes give float64.
    """
    if not np.issubdtype(features.dtype, np.floating):
        return features
    kernel = canonical_hrf(tr)
    if kind == "causal":
        return causal(features, kernel / kernel.sum())
    pad = int(np.round(pad_s / tr))
    padded = np.pad(features, [(pad, pad)] + [(0, 0)] * (features.ndim - 1))
    start = pad + len(kernel) // 2
    whole = convolve(padded.reshape(len(padded), -1), kernel, "full")[start : start + len(features)]
    whole = whole.reshape(features.shape)
    return whole if features.ndim <= 2 else whole.astype(features.dtype)


def causal(features: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Convolve features [time, ...] causally, tap by tap in their own dtype; suits features as large as a film."""
    out = np.zeros(features.shape, features.dtype)
    for lag, weight in enumerate(kernel[: len(features)]):
        if weight:
            out[lag:] += features.dtype.type(weight) * features[: len(features) - lag]
    return out


def resample(features: np.ndarray, length: int) -> np.ndarray:
    """Resample features [time, ...] to `length` evenly spaced times from first to last: linear, integers nearest."""
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
    """Resample stimuli to the shortest of the four lengths, cut fMRI [time, voxel] to it, and apply the response.

    hrf: the response of the stimuli: `causal`, `original`, or None for none.
    """
    length = min(len(fmri), *(len(value) for value in stimuli.values()))
    aligned = {name: resample(value, length) for name, value in stimuli.items()}
    if hrf is not None:
        aligned = {name: respond(value, tr, hrf) for name, value in aligned.items()}
    return {**aligned, "fmri": fmri[:length]}
