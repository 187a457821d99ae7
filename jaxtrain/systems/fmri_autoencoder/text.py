"""Text features of every volume: embeddings of scene annotations."""

import math
import pathlib
import zlib
from collections.abc import Sequence

import numpy as np

from jaxtrain import hub
from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.extras import require

START, END = "Start Time (s)", "End Time (s)"
TEXT_COLUMNS = ("Scene Details - A Level", "Name - All", "Location")


def annotations(path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return start and end in seconds (float64 [scene]) and the text of every scene with text, from annotations.xlsx.

    Raises UserError if a time column is missing.
    """
    table = read_table(path)
    texts = scene_texts(table)
    spoken = [i for i, text in enumerate(texts) if text]
    times = table[[START, END]].to_numpy(np.float64)[spoken]
    return times[:, 0], times[:, 1], [texts[i] for i in spoken]


def read_table(path):
    """Return annotations.xlsx as a pandas DataFrame. Raises UserError if a time column is missing."""
    pandas = require("pandas", "to read the annotations")
    require("openpyxl", "to read the annotations")
    table = pandas.read_excel(path)
    table.columns = [str(name).strip() for name in table.columns]
    missing = [name for name in (START, END) if name not in table.columns]
    if missing:
        raise UserError(f"{path}: column {', '.join(missing)} is missing; it has {', '.join(table.columns)}")
    return table


def scene_texts(table, columns: Sequence[str] = TEXT_COLUMNS, separator: str = "; ") -> list[str]:
    """Return the text of every row: its cells in those of `columns` that the table has, without the empty ones."""
    present = [name for name in columns if name in table.columns]
    rows = table[present].fillna("").astype(str).to_numpy()
    return [separator.join(part.strip() for part in row if part.strip()) for row in rows]


def concatenated(
    embeddings: np.ndarray, start, end, volumes: int, tr: float, at_most: int = 3, gap: str = "forward_fill"
) -> np.ndarray:
    """Return the embeddings of the scenes that touch each volume, side by side: float32 [volume, at_most * width].

    embeddings: [scene, width]; start, end: seconds [scene]. The first `at_most` scenes are used, in row order; unused
    places are 0. gap: see `fill_gaps`.
    """
    width = embeddings.shape[1]
    out, filled = np.zeros((volumes, at_most * width), np.float32), np.zeros(volumes, bool)
    for volume in range(volumes):
        until = (volume + 1) * tr
        touching = np.flatnonzero((start < until) & (end > max(0.0, until - tr)))[:at_most]
        if len(touching):
            out[volume, : len(touching) * width] = embeddings[touching].reshape(-1)
            filled[volume] = True
    return fill_gaps(out, filled, gap)


def averaged(
    embeddings: np.ndarray, start, end, volumes: int, tr: float, how: str = "mean", gap: str = "forward_fill"
) -> np.ndarray:
    """Return one embedding for the scenes of each volume, float32 [volume, width]. how: mean, first, last or max.

    A scene belongs to the volumes from floor(start / tr) to ceil(end / tr) - 1.
    """
    scenes: list[list[int]] = [[] for _ in range(volumes)]
    for scene, (begin, stop) in enumerate(zip(start, end, strict=True)):
        for volume in range(max(0, math.floor(begin / tr)), min(volumes, math.ceil(stop / tr))):
            scenes[volume].append(scene)
    combine = {"mean": lambda e: e.mean(0), "first": lambda e: e[0], "last": lambda e: e[-1], "max": lambda e: e.max(0)}
    out = np.zeros((volumes, embeddings.shape[1]), np.float32)
    for volume, members in enumerate(scenes):
        if members:
            out[volume] = combine[how](embeddings[members])
    return fill_gaps(out, np.array([bool(members) for members in scenes]), gap)


def fill_gaps(features: np.ndarray, filled: np.ndarray, gap: str) -> np.ndarray:
    """Fill the rows that no scene fills.

    gap: `forward_fill` (the last filled row, 0 before the first), `zero`, or `interpolate` (linear between the filled
    neighbours, the nearest one outside).
    """
    if gap == "zero" or filled.all() or not filled.any():
        return features
    known, out = np.flatnonzero(filled), features.copy()
    for row in np.flatnonzero(~filled):
        before, after = known[known < row], known[known > row]
        if gap == "forward_fill":
            if len(before):
                out[row] = features[before[-1]]
        elif len(before) and len(after):
            share = (row - before[-1]) / (after[0] - before[-1])
            out[row] = (1 - share) * features[before[-1]] + share * features[after[0]]
        else:
            out[row] = features[before[-1] if len(before) else after[0]]
    return out


def embed(texts: list[str], encoder: str, width: int) -> np.ndarray:
    """Return unit-length embeddings float32 [text, width].

    encoder: a sentence-transformers model, or `hashing` for words in hashed buckets. Raises UserError if there is no
    such model, or its embeddings are not `width` wide.
    """
    if encoder == "hashing":
        return hashed(texts, width)
    if not pathlib.Path(encoder).is_dir():
        hub.cache_only_if_unreachable()
    library = require("sentence_transformers", "for text embeddings (or set data.text_encoder=hashing)")
    try:
        model = library.SentenceTransformer(encoder)
    except OSError as error:
        raise hub.not_to_be_had(encoder, "data.text_encoder", "data.text_encoder=hashing needs none", error) from None
    vectors = model.encode(texts, normalize_embeddings=True, show_progress_bar=True)
    if vectors.shape[1] != width:
        raise UserError(f"data.text_encoder: {encoder} gives {vectors.shape[1]} values, the model wants {width}")
    return np.asarray(vectors, np.float32)


def hashed(texts: list[str], width: int) -> np.ndarray:
    """Return bags of words with rows of unit length; the hash of a word gives its bucket and its sign."""
    out = np.zeros((len(texts), width), np.float32)
    for row, text in enumerate(texts):
        for word in text.lower().split():
            code = zlib.crc32(word.strip(".,;:!?").encode())
            out[row, code % width] += 1 if code & 0x10000 else -1
    return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)
