"""Replay the recorded criteria, metrics and learning rates of fmri_autoencoder."""

import ast
import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.fmri_autoencoder import losses, metrics
from jaxtrain.systems.fmri_autoencoder.original.schedules import OriginalRate, gen1_rate, head_rate


def group(tensors, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def prefixed(prefix: str, values) -> dict[str, np.ndarray]:
    return {f"{prefix}{key}": np.asarray(value) for key, value in values.items()}


def criterion(kind: str, weights: dict):
    names = {"plain": losses.CombinedAutoEncoderLoss, "normalized": losses.NormalizedCombinedAutoEncoderLoss}
    known = {name: weights[name] for name in names["plain"].__dataclass_fields__ if name in weights}
    return names[kind](**known)


def narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype == np.int64 else array


def rate_of(head: bool, given: dict, steps: int):
    keys = {"learning_rate": "base", "num_epochs": "epochs", "warmup_epochs": "warmup_epochs", "min_lr": "min_lr"}
    values = {ours: given[theirs] for theirs, ours in keys.items() if theirs in given}
    rule = OriginalRate(steps=steps, kind=given.get("scheduler_type", "cosine"), **values)
    return head_rate(rule) if head else gen1_rate(rule)


# --- criteria and metrics -------------------------------------------------------------------------------------------


def replay_losses(case: dict, tensors) -> dict[str, np.ndarray]:
    shared = (
        _literal(next((v for v in case["cases"].values() if "{" in str(v) and "Reconstruction" in str(v)), "")) or {}
    )
    out = {}
    for name, what in case["cases"].items():
        inputs = {k: jnp.asarray(narrow(v)) for k, v in group(tensors, f"{name}/in/").items()}
        if "p" in inputs:
            dim = int(re.search(r"dim(\d)", name + str(what)).group(1))
            out[f"{name}/out/corr"] = np.asarray(metrics.compute_correlation_metric(inputs["p"], inputs["y"], dim))
            out[f"{name}/out/r2"] = np.asarray(metrics.compute_r2_score(inputs["p"], inputs["y"], dim))
            continue
        function = _criterion_of(name, what, shared)
        predictions = {k: v for k, v in inputs.items() if k.startswith("pred_")}

        def run(predictions, function=function, inputs=inputs):
            total, parts = function({**inputs, **predictions})
            return total.sum(), {"total": total, **parts}

        grads, outputs = jax.grad(run, has_aux=True)(predictions)
        out |= prefixed(f"{name}/out/", outputs) | prefixed(f"{name}/grad/", grads)
    return out


def _criterion_of(name: str, what, shared: dict):
    """inputs -> (total, parts), by the case's description."""
    text = what if isinstance(what, str) else json.dumps(what)
    normalized = name.startswith("n") or "Normalized" in text
    by_std = "normalize_by_std=False" not in text
    if name.lstrip("n").startswith("fmri"):
        kind = re.search(r"'(mse|mae|correlation)'", text) or re.search(r"(mse|mae|correlation)", name + text)
        reduction = _reduction(name, text)
        if normalized:
            criterion_ = losses.NormalizedFMRIMatchingLoss(kind.group(1), reduction, normalize_by_std=by_std)
            return lambda i: criterion_(i["pred_fmri"], i["tgt_fmri"])
        criterion_ = losses.FMRIMatchingLoss(kind.group(1), reduction)
        return lambda i: (criterion_(i["pred_fmri"], i["tgt_fmri"]), {})
    if "combined" in name:
        weights = what if isinstance(what, dict) else _literal(text)
        while weights and isinstance(next(iter(weights.values())), dict):
            weights = next(iter(weights.values()))
        made = criterion("normalized" if normalized else "plain", weights or {})

        def combined(i):
            outputs = {f"{k}_recon": i[f"pred_{k}"] for k in ("video", "audio", "text")}
            outputs["predicted_fmri"] = i.get("pred_fmri")
            fmri = None if "no_fmri" in name or "None" in text else i.get("tgt_fmri")
            return made(outputs, i["tgt_video"], i["tgt_audio"], i["tgt_text"], fmri)

        return combined
    weights = _literal(text) or shared
    reduction = _reduction(name, text)
    if normalized:
        made = losses.NormalizedReconstructionLoss(**weights, reduction=reduction, normalize_by_std=by_std)
    else:
        made = losses.ReconstructionLoss(**weights, reduction=reduction)
    pairs = lambda i: [i[f"{side}_{kind}"] for kind in ("video", "audio", "text") for side in ("pred", "tgt")]
    return lambda i: made(*pairs(i))


def _reduction(name: str, text: str) -> str:
    found = re.search(r"reduction='(\w+)'", text) or re.search(r"_(mean|sum|none)\b", name)
    return found.group(1) if found else "mean"


def _literal(text) -> dict | None:
    found = re.search(r"\{[^{}]*\}", str(text))
    return ast.literal_eval(found.group(0)) if found else None


# --- learning rates -------------------------------------------------------------------------------------------------


def replay_rates(case: dict, tensors) -> dict[str, np.ndarray]:
    """The rate of every step and the one reported for every epoch; empty from where the original stops."""
    out = {}
    for name, given in case["cases"].items():
        steps, epochs = given["steps"], given["num_epochs"]
        for generation in ("gen1", "head"):
            used, logged = [], []
            head = generation == "head"
            try:
                rate = rate_of(head, given, steps)
                for epoch in range(epochs):
                    for step in range(epoch * steps, (epoch + 1) * steps):
                        used.append(rate(step))
                        if head:
                            after = rate(step + 1)
                    logged.append(after if head else used[-1])
            except ValueError:
                pass
            out[f"{generation}/{name}/lr"] = np.array(used, np.float64)
            out[f"{generation}/{name}/logged"] = np.array(logged, np.float64)
    return out
