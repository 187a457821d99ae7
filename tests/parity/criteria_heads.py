"""Replay the recorded heads, span tables and data files of criteria_evidence."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.systems.criteria_evidence import architecture_models, csv_files, examples, metrics, tokenization
from jaxtrain.systems.criteria_evidence.transformer_parts import SequencePooler
from torch_bridge.layouts import Carry
from torch_bridge.state_dict import load_state_dict


def abstract(make) -> nnx.Module:
    """The module without drawing its weights, which a golden case brings along."""
    model = nnx.eval_shape(make)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, Carry):
            variable.set_value(jnp.zeros(variable.shape, variable.dtype))
    return model


FIXTURE = pathlib.Path(__file__).parents[1] / "golden" / "criteria_evidence" / "fixture"


def replay_data(case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Items of every dataset over the rows whose answer is found, padded to the full length."""
    beside = pathlib.Path(case.get("folder", "")) / case.get("fixture", "fixture")
    folder = beside if "folder" in case and (beside / "tokenizer.json").is_file() else FIXTURE
    tokenizer = tokenization.load(folder / "tokenizer.json")
    texts = csv_files.read_criteria(folder / "dsm_criteria.json")
    result = {}
    for dataset in case["ok_rows"]:
        family, architecture = dataset.split("_", 1)
        file = "redsm5_annotations.csv" if architecture == "criteria" else "redsm5_matched_evidence.csv"
        found = examples.make_examples(
            csv_files.read_rows(folder / file, ("sentence_text", "status")),
            tokenizer,
            architecture,
            pair=family == "arch",
            criterion_texts=texts,
            max_length=case["criteria_max_length"],
            evidence_max_length=case["evidence_max_length"],
        )
        some = next(iter(found.texts.values()))
        rows = [row for row in range(len(some)) if row not in found.problems]
        for side, encoded in found.texts.items():
            short = architecture == "criteria" or side == "criteria_"
            width = case["criteria_max_length" if short else "evidence_max_length"]
            columns = examples.padded(encoded, rows, width, tokenizer.pad_id)
            result |= {f"out/{dataset}.{side}{name}": column for name, column in columns.items()}
        if found.labels is not None:
            result[f"out/{dataset}.labels"] = found.labels[rows]
        if found.spans is not None:
            result[f"out/{dataset}.start_positions"] = found.spans[rows, 0]
            result[f"out/{dataset}.end_positions"] = found.spans[rows, 1]
    return {key: np.asarray(value, np.int64) for key, value in result.items()}


def replay_heads(case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every pooling with and without a mask, and every head configuration."""
    hidden = jnp.asarray(tensors["in/hidden_states"])
    mask = jnp.asarray(tensors["in/attention_mask"])
    pooled = jnp.asarray(tensors["in/pooler_output"]) if "in/pooler_output" in tensors else None
    width = hidden.shape[-1]
    result: dict[str, jax.Array] = {}
    for pooling in ("mean", "max", "attn"):
        pooler = loaded(
            abstract(lambda: SequencePooler(width, pooling, rngs=nnx.Rngs(0))), tensors, f"param/pooler_{pooling}."
        )
        for suffix, given in (("", mask), ("_nomask", None), ("_floatmask", mask.astype(jnp.float32))):
            result[f"out/{pooling}{suffix}"] = pooler(hidden, given)
        result[f"grad/hidden_{pooling}_rows1plus"] = jax.grad(lambda h: jnp.square(pooler(h, mask)[1:]).sum())(hidden)
    first = SequencePooler(width, "cls", rngs=nnx.Rngs(0))
    result |= {"out/cls_with_pooler": first(hidden, mask, pooled), "out/cls_token0": first(hidden, mask)}
    for name, options in case["head_cfgs"].items():
        labels = tensors[f"param/cls{name}.out.weight"].shape[0] if f"param/cls{name}.out.weight" in tensors else 3
        head = abstract(lambda: architecture_models.ClassificationHead(width, labels, **options, rngs=nnx.Rngs(0)))
        result[f"out/cls{name}"] = loaded(head, tensors, f"param/cls{name}.")(
            hidden[:, 0] if pooled is None else pooled
        )
        span = abstract(lambda: architecture_models.SpanPredictionHead(width, **options, rngs=nnx.Rngs(0)))
        start, end = loaded(span, tensors, f"param/span{name}.")(hidden)
        result |= {f"out/span{name}_start": start, f"out/span{name}_end": end}
    return result


def loaded(module: nnx.Module, tensors: dict[str, np.ndarray], prefix: str) -> nnx.Module:
    weights = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    load_state_dict(module, weights, strict=True)
    return module


def replay_spans(case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The original's evaluations of the given logits: `<function>/<metric>`."""
    found = span_evaluations(case, tensors)
    return {f"{name}/{metric}": np.float64(value) for name, values in found.items() for metric, value in values.items()}


def span_evaluations(case: dict, tensors: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """{the original's function: its metrics}."""
    given = {key.removeprefix("in/"): value for key, value in tensors.items()}
    ends = [given[f"{name}_logits"].argmax(-1) for name in ("start", "end")]
    spans = metrics.span_scores(*ends, given["start_positions"], given["end_positions"])
    rows = [metrics.cross_entropy_rows(given[f"{n}_logits"], given[f"{n}_positions"]) for n in ("start", "end")]
    size, weights = case["batch_size"], case["loss_weights"]
    span_loss = metrics.mean_of_batch_means((rows[0] + rows[1]) / 2, size)
    classes = metrics.engine_scores(given["labels"], given["cls_logits"].argmax(-1))
    class_loss = metrics.mean_of_batch_means(metrics.cross_entropy_rows(given["cls_logits"], given["labels"]), size)
    total = weights["criteria"] * class_loss + weights["evidence"] * span_loss
    both = {**metrics.combined_scores(classes, spans), "loss": total}
    evidence = {**spans, "loss": span_loss}
    return {"_span_metrics": spans, "evidence._evaluate": evidence, "share._evaluate": both, "joint._evaluate": both}
