"""Evaluation report of a split: a JSON file with all scores, and pictures of the confusion matrix and ROC curve."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import data, metrics
from jaxtrain.systems.criteria_evidence.decoding import span_text
from jaxtrain.systems.criteria_evidence.losses import outputs
from torch_bridge.atomic_file import write_text


def write(architecture: str, model, source, config, folder) -> list[pathlib.Path]:
    """Write evaluation_results.json, and for classes confusion_matrix.png and roc_curve.png, to `folder`.

    Returns the paths. The pictures need matplotlib.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = data.load(architecture, config)
    rows = rows_of(corpus, source)
    predicted = predict(model, corpus, rows, config)
    report = scores_of(architecture, predicted, corpus, rows, config)
    path = folder / "evaluation_results.json"
    write_text(path, json.dumps(finite(report), indent=1) + "\n")
    if "labels" not in predicted:
        return [path]
    return [path, *pictures(predicted["labels"], predicted["probabilities"], folder)]


def rows_of(corpus: data.Corpus, source: Any) -> np.ndarray:
    """Return the corpus' row indices of a split's source.

    Raises UserError for any other dataset, because the report needs the corpus' texts.
    """
    for members in (*corpus.splits.values(), corpus.rows_of("all")):
        if len(members) == len(source) and _same(corpus, members, source):
            return members
    raise UserError("the report covers the splits of the config's own data, not another dataset")


def _same(corpus: data.Corpus, members: np.ndarray, source: Any) -> bool:
    if isinstance(source, data.TextSource):
        return source.rows is members or np.array_equal(source.rows, members)
    side = next(iter(corpus.examples.texts))
    ids = source.columns[f"{side}input_ids"]
    ids_of_members = corpus.columns(members, dict.fromkeys(corpus.examples.texts, ids.shape[1]))[f"{side}input_ids"]
    return np.array_equal(ids_of_members, ids)


def predict(model, corpus: data.Corpus, rows: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Compute probabilities, labels and decoded spans of the rows, batch by batch."""
    size = config.data.eval_batch_size or config.data.batch_size
    source = data.source_of(corpus, rows, config)

    @jax.jit
    def eval_statistics(batch):
        return metrics.eval_statistics(outputs(model, batch), batch, config).rows

    collected: dict[str, list] = {}
    for first in range(0, len(rows), size):
        positions = np.arange(first, min(first + size, len(rows)))
        padded = np.concatenate([positions, np.full(size - len(positions), positions[0])])
        if isinstance(source, data.TextSource):
            batch = source.collate_for(padded)([source[i] for i in padded])
        else:
            batch = source[padded]
        batch |= {"valid": np.arange(size) < len(positions), "index": padded.astype(np.int32)}
        for key, value in jax.device_get(eval_statistics(batch)).items():
            collected.setdefault(key, []).append(np.asarray(value)[: len(positions)])
    return {key: np.concatenate(values) for key, values in collected.items()}


def scores_of(
    architecture: str, predicted: Mapping[str, np.ndarray], corpus: data.Corpus, rows, config
) -> dict[str, Any]:
    """Return the content of the report as plain numbers, lists and strings."""
    report: dict[str, Any] = {"architecture": architecture, "rows": len(rows), "rows_dropped": corpus.dropped}
    if "labels" in predicted:
        predictions = predicted["probabilities"].argmax(axis=-1)
        criteria = [corpus.examples.criteria[row] for row in rows]
        part = metrics.evaluation_scores(predicted["labels"], predictions, predicted["probabilities"])
        part["per_criterion_f1"] = metrics.per_criterion_f1(predicted["labels"], predictions, criteria)
        report["evidence" if architecture == "evidence" else "criteria"] = part  # evidence: family base only
    if "starts" in predicted:
        report["evidence"] = span_report(predicted, corpus, rows)
    if {"criteria", "evidence"} <= set(report):
        report["joint_score"] = (report["criteria"]["f1_binary"] + report["evidence"]["span_em"]) / 2
    if architecture == "criteria":
        report |= report["criteria"]  # at the top level too, as in the original's file
    return report


def span_report(predicted: Mapping[str, np.ndarray], corpus: data.Corpus, rows) -> dict[str, Any]:
    """Return scores of the token positions, and SQuAD scores of the corresponding texts."""
    known = np.flatnonzero(predicted["true_starts"] >= 0)
    positions = [predicted[name][known] for name in ("starts", "ends", "true_starts", "true_ends")]
    part: dict[str, Any] = {**metrics.span_scores(*positions), "span_f1": metrics.span_f1(*positions)}
    encoded = corpus.examples.texts.get("evidence_", corpus.examples.texts.get(""))
    exact, overlap = [], []
    for number, start, end in zip(known, *positions[:2], strict=True):
        row = rows[number]
        said = span_text(corpus.examples.contexts[row], encoded.row(row)["offsets"], int(start), int(end))[2]
        answer = corpus.examples.answers[row]
        exact.append(metrics.answer_em(said, answer))
        overlap.append(metrics.answer_f1(said, answer))
    part |= {"squad_em": float(np.mean(exact)), "squad_f1": float(np.mean(overlap))} if exact else {}
    return part | {"total_samples": len(known)}


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value


def pictures(labels: np.ndarray, probabilities: np.ndarray, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write the confusion matrix, and the ROC curve of class 1 if both classes occur; return the paths."""
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay, RocCurveDisplay

    names = metrics.CLASS_NAMES if probabilities.shape[1] == 2 else [str(i) for i in range(probabilities.shape[1])]
    figure = Figure(figsize=(4, 4), layout="constrained")
    predictions = probabilities.argmax(axis=-1)
    ConfusionMatrixDisplay.from_predictions(
        labels, predictions, labels=range(len(names)), display_labels=names, ax=figure.subplots(), colorbar=False
    )
    written = [folder / "confusion_matrix.png"]
    figure.savefig(written[0], dpi=120)
    if len(names) == 2 and len(np.unique(labels)) == 2:
        figure = Figure(figsize=(4, 4), layout="constrained")
        RocCurveDisplay.from_predictions(labels, probabilities[:, 1], ax=figure.subplots(), name="present")
        written.append(folder / "roc_curve.png")
        figure.savefig(written[-1], dpi=120)
    return written
