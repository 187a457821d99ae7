"""Golden cases of the data pipeline: response, alignment, framing, text windows, masks, splits."""

import re

import numpy as np

from jaxtrain.systems.fmri_autoencoder import audio, hrf, text, video, volumes
from jaxtrain.systems.fmri_autoencoder.sources import ScanSource, split_volumes

STAGES = ("hrf/", "align/", "encodec/", "fmri/", "dataset/", "video/", "text/")


def group(tensors, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def number(pattern: str, sentence, default):
    found = re.search(pattern, str(sentence))
    return type(default)(found.group(1)) if found else default


def replay(case: dict, tensors) -> dict[str, np.ndarray]:
    how, expects = case["how"], case["expects"]
    recipes = {
        "hrf": replay_hrf,
        "align": replay_align,
        "video": replay_video,
        "encodec": replay_codes,
        "text": replay_text,
        "fmri": replay_volumes,
        "dataset": replay_dataset,
    }
    out = {}
    for stage, recipe in recipes.items():
        if any(key.startswith(f"{stage}/") for key in expects):
            out |= recipe(how, expects, group(tensors, f"{stage}/in/"))
    return {
        key: np.asarray(value, np.uint8) if np.asarray(value).dtype == bool else value for key, value in out.items()
    }


def replay_hrf(how, expects, given) -> dict:
    tr = number(r"tr=([\d.]+)", how.get("hrf", ""), 1.5)
    kernel, out = hrf.canonical_hrf(tr), {}
    impulse = lambda length, at: np.eye(length)[:, at : at + 1]
    for key in expects:
        if found := re.match(r"hrf/kernel_tr([\d.]+)$", key):
            out[key] = hrf.canonical_hrf(float(found.group(1)))
        elif found := re.match(r"hrf/out/padded_impulse_at_(\d+)$", key):
            out[key] = hrf.respond(impulse(expects[key][0], int(found.group(1))), tr, "original")
        elif found := re.match(r"hrf/out/(full|same|padded)_(\w+)$", key):
            mode, x = found.group(1), given[found.group(2)]
            out[key] = hrf.respond(x, tr, "original") if mode == "padded" else hrf.convolve(x, kernel, mode)
    return out


def replay_align(how, expects, given) -> dict:
    tr = number(r"tr=([\d.]+)", how.get("align", ""), 1.5)
    out = {}
    for kind, response in {tuple(key.split("/")[1:3]) for key in expects if key.startswith("align/")}:
        stimuli = {name: given[name] for name in ("video", "text")} | {"audio": given[f"audio_{kind}"]}
        aligned = hrf.align(stimuli, given["fmri"], tr, "original" if response == "hrf1" else None)
        out |= {f"align/{kind}/{response}/{name}": value for name, value in aligned.items()}
    return out


def replay_video(how, expects, given) -> dict:
    said = how.get("video", "")
    tr, skip = number(r"tr=([\d.]+)", said, 1.5), number(r"(?:frame_)?skip=(\d+)", said, 2)
    fps = number(r"at ([\d.]+) fps", said, 25.0)
    frames, out = given["frames_bgr"][..., ::-1], {}
    for key, shape in expects.items():
        if found := re.match(r"video/features_(\d+)x(\d+)$", key):
            size = int(found.group(1)), int(found.group(2))
            windows = video.window_features(frames, len(frames), fps, tr, skip, size, shape[0])
            out[key] = windows.reshape(len(windows), -1).astype(np.float32) / 255
    return out


def replay_codes(how, expects, given) -> dict:
    said = how.get("encodec", "")
    tr, bandwidth = number(r"i\*([\d.]+)\*75", said, 1.5), number(r"bandwidth ([\d.]+)", said, 3.0)
    return {"encodec/features": audio.code_features(given["codes"], tr, expects["encodec/features"][0], bandwidth)}


def replay_text(how, expects, given) -> dict:
    said, out = how.get("text", ""), {}
    tr, at_most = number(r"TRs of ([\d.]+)", said, 1.5), number(r"max_annotations_per_tr=(\d+)", said, 3)
    arguments = given["embeddings"], given["start"], given["end"]
    for key, shape in expects.items():
        if found := re.match(r"text/concatenate_(\w+)$", key):
            out[key] = text.concatenated(*arguments, shape[0], tr, at_most, found.group(1))
        elif found := re.match(r"text/average_(?:(mean|first|last|max)_)?(\w+)$", key):
            out[key] = text.averaged(*arguments, shape[0], tr, found.group(1) or "mean", found.group(2))
    return out


def replay_volumes(how, expects, given) -> dict:
    subjects = {key.removeprefix("vol_"): value for key, value in given.items()}
    mask = volumes.shared_mask(volumes.scan_mask(value) for value in subjects.values())
    out = {"fmri/mask": mask, "fmri/coordinates": np.argwhere(mask)}
    for name, value in subjects.items():
        features = volumes.voxels(value, mask, expects[f"fmri/features_{name}"][0])
        mean, std = volumes.mean_and_std(features)
        out |= {f"fmri/mean_{name}": mean, f"fmri/std_{name}": std, f"fmri/features_{name}": (features - mean) / std}
    return out


def replay_dataset(how, expects, given) -> dict:
    metadata, out = how["dataset"]["metadata"], {}
    fmri = given["fmri_features"]
    stimuli = [{name: given[f"{name}_features"][i] for name in ("video", "audio", "text")} for i in range(len(fmri))]
    for split in sorted({key.split("/")[1] for key in expects if key.startswith("dataset/")}):
        name = {"train": "train", "val": "validation"}.get(split)
        times = split_volumes(fmri.shape[1], 0.8).get(name, range(fmri.shape[1]))
        source = ScanSource(stimuli, list(fmri), metadata["subject_ids"], times)
        items = [source[i] for i in range(len(source))]
        fields = {key.split("/")[2] for key in expects if key.startswith(f"dataset/{split}/")}
        out |= {f"dataset/{split}/{field}": np.stack([item[field] for item in items]) for field in fields}
    return out
