"""Compute the metrics of the four tasks from the models' outputs."""

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.criteria_evidence import losses
from jaxtrain.task import Statistics


def decode(start_logits, end_logits, decode, visible):
    """Return the predicted first and last token [batch] of every row.

    decode.valid_only: the best pair with start <= end < start + max_tokens inside `visible`. Otherwise two independent
    argmaxes, over padding too, as the original does (the end may lie before the start).
    """
    if not decode.valid_only:
        return jnp.argmax(start_logits, axis=-1), jnp.argmax(end_logits, axis=-1)
    tokens = start_logits.shape[-1]
    lowest = jnp.finfo(jnp.float32).min
    start_logits, end_logits = (jnp.where(visible, x.astype(jnp.float32), lowest) for x in (start_logits, end_logits))
    length = jnp.arange(tokens)[None, :] - jnp.arange(tokens)[:, None]
    allowed = (length >= 0) & (length < decode.max_tokens) & visible[:, :, None] & visible[:, None, :]
    both = jnp.where(allowed, start_logits[:, :, None] + end_logits[:, None, :], lowest)
    best = jnp.argmax(both.reshape(len(both), -1), axis=-1)
    return best // tokens, best % tokens


def eval_statistics(outputs: Mapping[str, Any], batch: Mapping[str, Any], config: Any) -> Statistics:
    """Return a batch's Statistics.

    rows: class probabilities and labels, predicted and true span positions. sums: the original's epoch loss, only with
    `compat: original`.
    """
    rows: dict[str, Any] = {}
    if "logits" in outputs:
        shifted = jnp.asarray(outputs["logits"], jnp.float32)
        shifted = jnp.exp(shifted - shifted.max(axis=-1, keepdims=True))
        rows = {"probabilities": shifted / shifted.sum(axis=-1, keepdims=True), "labels": batch["labels"]}
    if "start_logits" in outputs:
        visible = losses.text_tokens(batch)
        logits = (jnp.asarray(outputs["start_logits"]), jnp.asarray(outputs["end_logits"]))
        rows["starts"], rows["ends"] = decode(*logits, config.decode, jnp.asarray(visible))
        rows["true_starts"], rows["true_ends"] = batch["start_positions"], batch["end_positions"]
    sums = {}
    if config.compat == "original":  # mean of batch means: a short last batch counts fully
        arrays = {key: jnp.asarray(value) for key, value in batch.items()}
        value, weight, _ = losses.combined(outputs, arrays, config.loss.weights)
        sums = {"batch_loss": jnp.where(weight > 0, value, 0.0), "batches": (weight > 0).astype(jnp.float32)}
    return Statistics(sums, rows)


def compute(sums: Mapping[str, Any], rows: Mapping[str, np.ndarray], config: Any) -> dict[str, float]:
    """Return the metrics of a split.

    Classes: accuracy, f1_*, precision_macro, recall_macro, auroc. Spans: start_accuracy, end_accuracy, span_em,
    span_f1. With both, they have the prefixes criteria_ and evidence_ (criteria_f1, criteria_precision and
    criteria_recall of class 1 are added, f1_binary is left out), and joint_score is added.
    """
    classes, spans = {}, {}
    if "labels" in rows:
        probabilities = rows["probabilities"]
        scores = classification_scores(rows["labels"], probabilities.argmax(axis=-1), probabilities)
        classes = {key: float("nan") if value is None else value for key, value in scores.items()}
    if "starts" in rows:
        known = rows["true_starts"] >= 0  # rows that were kept only for their label have no span
        positions = [rows[name][known] for name in ("starts", "ends", "true_starts", "true_ends")]
        spans = span_scores(*positions) | {"span_f1": span_f1(*positions)}
    batch_loss = {"loss": float(sums["batch_loss"] / sums["batches"])} if float(sums.get("batches", 0)) else {}
    if not (classes and spans):
        return batch_loss | classes | spans
    del classes["f1_binary"]
    classes |= engine_scores(rows["labels"], rows["probabilities"].argmax(axis=-1))
    return batch_loss | combined_scores(classes, spans)


def softmax(logits) -> np.ndarray:
    """Return the softmax over the last axis in float64, [row, class]."""
    shifted = np.asarray(logits, np.float64)
    shifted = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def cross_entropy_rows(logits, labels) -> np.ndarray:
    """Return the negative log-likelihood of every row, in nats."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(axis=-1)) + top[..., 0]
    return log_sum - np.take_along_axis(logits, np.asarray(labels)[..., None], axis=-1)[..., 0]


def mean_of_batch_means(rows: np.ndarray, batch_size: int) -> float:
    """Return the original's epoch loss: the mean of batch means, so a short last batch counts as much as a full one."""
    means = [rows[i : i + batch_size].mean() for i in range(0, len(rows), batch_size)]
    return float(np.mean(means)) if means else 0.0


def macro(labels, predictions, average: str) -> tuple[float, float, float]:
    """Return precision, recall and F1 averaged over labels ("macro", "micro", "weighted"), or of label 1 ("binary")."""
    from sklearn.metrics import precision_recall_fscore_support as scores

    precision, recall, f1, _ = scores(labels, predictions, average=average, zero_division=0)
    return float(precision), float(recall), float(f1)


def auroc(labels, probabilities) -> float | None:
    """Return the area under the ROC curve; for more than two classes the one-vs-rest macro average.

    If it is undefined: NaN for two classes of which only one occurs, None for several classes of which one is missing.
    """
    from sklearn.metrics import roc_auc_score

    labels, probabilities = np.asarray(labels), np.asarray(probabilities)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if probabilities.shape[1] == 2:
                return float(roc_auc_score(labels, probabilities[:, 1]))
            return float(roc_auc_score(labels, probabilities, multi_class="ovr", average="macro"))
        except ValueError:  # scikit-learn raises it where the area is undefined
            return None


def validation_scores(logits, labels, batch_size: int) -> dict[str, float | None]:
    """Return the metrics of the original's Trainer.validate, under its keys."""
    labels = np.asarray(labels)
    predictions = np.argmax(logits, axis=-1)
    precision, recall, f1 = macro(labels, predictions, "macro")
    return {
        "val_loss": mean_of_batch_means(cross_entropy_rows(logits, labels), batch_size),
        "val_accuracy": float((predictions == labels).mean()),
        "val_f1_macro": f1,
        "val_f1_micro": macro(labels, predictions, "micro")[2],
        "val_precision_macro": precision,
        "val_recall_macro": recall,
        "val_auroc_macro": auroc(labels, softmax(logits)),
    }


def classification_scores(labels, predictions, probabilities) -> dict[str, Any]:
    """Return accuracy, F1 (macro, micro, weighted and binary), macro precision and recall, and AUROC."""
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    precision, recall, f1 = macro(labels, predictions, "macro")
    ones = engine_scores(labels, predictions)
    return {
        "accuracy": float((predictions == labels).mean()),
        "f1_macro": f1,
        "f1_micro": macro(labels, predictions, "micro")[2],
        "f1_weighted": macro(labels, predictions, "weighted")[2],
        "f1_binary": ones["f1"],
        "precision_macro": precision,
        "recall_macro": recall,
        "auroc": auroc(labels, probabilities),
    }


def engine_scores(labels, predictions) -> dict[str, float]:
    """Return accuracy, and precision, recall and F1 of class 1; 0 where a divisor is 0."""
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    hit = float(((labels == 1) & (predictions == 1)).sum())
    said, true = float((predictions == 1).sum()), float((labels == 1).sum())
    precision, recall = (hit / said if said else 0.0), (hit / true if true else 0.0)
    both = precision + recall
    return {
        "accuracy": float((labels == predictions).mean()) if len(labels) else 0.0,
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / both if both else 0.0,
    }


def per_criterion_f1(labels, predictions, criteria: Sequence[str]) -> dict[str, float]:
    """Return the macro F1 within each criterion; {} if `criteria` does not have one entry per row."""
    if len(criteria) != len(labels):
        return {}
    labels, predictions, criteria = np.asarray(labels), np.asarray(predictions), np.asarray(criteria)
    return {
        str(name): macro(labels[criteria == name], predictions[criteria == name], "macro")[2]
        for name in dict.fromkeys(criteria.tolist())
    }


def evaluator_scores(
    task_type: str,
    logits,
    labels,
    batch_size: int,
    criteria: Sequence[str] = (),
    class_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the original Evaluator's metrics. Like it, raises TypeError if task_type is not criteria or evidence.

    class_names: names of all classes for classification_report, which is omitted without them. Like scikit-learn's
    report, raises ValueError if a named class occurs neither in the labels nor in the predictions.
    """
    if task_type not in ("criteria", "evidence"):
        raise TypeError(f"task_type {task_type!r} is unknown, wanted criteria or evidence")
    from sklearn.metrics import classification_report, confusion_matrix

    labels = np.asarray(labels)
    predictions = np.argmax(logits, axis=-1)
    precision, recall, f1 = macro(labels, predictions, "macro")
    scores: dict[str, Any] = {"accuracy": float((predictions == labels).mean()), "precision_macro": precision}
    micro = macro(labels, predictions, "micro")
    if task_type == "evidence":
        scores["precision_micro"], scores["recall_micro"] = micro[0], micro[1]
    scores |= {"recall_macro": recall, "f1_macro": f1, "f1_micro": micro[2]}
    scores["f1_weighted"] = macro(labels, predictions, "weighted")[2]
    if task_type == "criteria":
        scores["auroc_macro"] = auroc(labels, softmax(logits))
    scores["per_criterion_f1"] = per_criterion_f1(labels, predictions, criteria)
    if task_type == "evidence" and len(np.unique(labels)) == 2:
        scores["exact_match"] = scores["accuracy"]
        swapped = ((labels == 0) & (predictions == 1)) | ((labels == 1) & (predictions == 0))
        scores["partial_match"] = 1.0 - float(swapped.mean())
    scores["confusion_matrix"] = confusion_matrix(labels, predictions).tolist()
    if class_names:
        scores["classification_report"] = classification_report(
            labels, predictions, output_dict=True, zero_division=0, target_names=list(class_names)
        )
    scores["loss"] = mean_of_batch_means(cross_entropy_rows(logits, labels), batch_size)
    return scores


CLASS_NAMES = ("Negative", "Positive")


def evaluation_scores(labels, predictions, probabilities, names: Sequence[str] = CLASS_NAMES) -> dict[str, Any]:
    """Return the fields of the original's evaluation_results.json.

    Unlike in the original, a split with only one class is reported too: every class in `names` has a row.
    """
    from sklearn.metrics import classification_report, confusion_matrix

    scores = classification_scores(labels, predictions, probabilities)
    del scores["f1_weighted"]
    classes = range(max(len(names), np.asarray(probabilities).shape[1]))
    names = [names[i] if i < len(names) else f"class {i}" for i in classes]
    report = classification_report(labels, predictions, labels=list(classes), target_names=names, zero_division=0)
    return scores | {
        "confusion_matrix": confusion_matrix(labels, predictions, labels=list(classes)).tolist(),
        "classification_report": report,
        "total_samples": len(labels),
    }


# --- spans ---------------------------------------------------------------------------------------------------------


def span_scores(starts, ends, true_starts, true_ends) -> dict[str, float]:
    """Return start_accuracy, end_accuracy and span_em (both right)."""
    right_start = np.asarray(starts) == np.asarray(true_starts)
    right_end = np.asarray(ends) == np.asarray(true_ends)
    means = [float(x.mean()) if len(x) else 0.0 for x in (right_start, right_end, right_start & right_end)]
    return dict(zip(("start_accuracy", "end_accuracy", "span_em"), means, strict=True))


def span_f1(starts, ends, true_starts, true_ends) -> float:
    """Return the mean F1 of predicted and true token positions [start, end]; a span with end < start is empty."""
    starts, ends, true_starts, true_ends = (np.asarray(x, np.int64) for x in (starts, ends, true_starts, true_ends))
    shared = np.maximum(0, np.minimum(ends, true_ends) - np.maximum(starts, true_starts) + 1)
    total = np.maximum(0, ends - starts + 1) + np.maximum(0, true_ends - true_starts + 1)
    return float((2 * shared / np.maximum(total, 1)).mean()) if len(starts) else 0.0


def normalise_answer(text: str) -> list[str]:
    """Return the text's lower-case words without punctuation and articles. Source: Rajpurkar et al. 2016 (SQuAD)."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def answer_f1(prediction: str, answer: str) -> float:
    """Return the word-overlap F1 of two texts as SQuAD does: 1 if both are empty, 0 if only one is."""
    said, true = normalise_answer(prediction), normalise_answer(answer)
    shared = sum((Counter(said) & Counter(true)).values())
    if not said or not true:
        return float(said == true)
    return 2 * shared / (len(said) + len(true))


def answer_em(prediction: str, answer: str) -> float:
    return float(normalise_answer(prediction) == normalise_answer(answer))


def combined_scores(classification: Mapping[str, float], spans: Mapping[str, float]) -> dict[str, float]:
    """Return criteria_* and evidence_* scores, and joint_score: the mean of criteria F1 and span exact match."""
    scores = {f"criteria_{key}": value for key, value in classification.items()}
    scores |= {f"evidence_{key}": value for key, value in spans.items()}
    return scores | {"joint_score": (classification["f1"] + spans["span_em"]) / 2}


def improved(value: float, best: float, mode: str, min_delta: float) -> bool:
    """Return True if the value is better than the best by more than min_delta; NaN never is."""
    if math.isnan(value):
        return False
    return value > best + min_delta if mode == "max" else value < best - min_delta
