"""The evaluation report that `jaxtrain.evaluate` writes."""

import json

import numpy as np
import pytest
from flax import nnx

from jaxtrain import config_io
from jaxtrain.data.sources import ArraySource
from jaxtrain.systems.criteria_evidence import TASKS

ENCODER = {"vocab_size": 55, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER |= {"intermediate_size": 8, "max_position_embeddings": 64}
DATA = {"synthetic_posts": 80, "max_length": 16, "evidence_max_length": 48, "batch_size": 8, "ratios": (0.6, 0.2, 0.2)}


def written(architecture: str, folder, **data):
    values = {"model": {"encoder": ENCODER}, "data": {**DATA, **data}}
    config = config_io.validate(config_io.schema(TASKS[architecture]), values)
    task = TASKS[architecture]
    model, source = task.build_model(config, nnx.Rngs(0)), task.build_data(config, "validation")
    files = task.report(model, source, config, folder)
    return files, json.loads((folder / "evaluation_results.json").read_text()), (model, source, config)


def test_a_share_report_has_every_field_of_both_questions(tmp_path):
    files, found, _ = written("share", tmp_path)
    assert {path.name for path in files} == {"evaluation_results.json", "confusion_matrix.png", "roc_curve.png"}
    wanted = {"accuracy", "f1_macro", "f1_micro", "f1_binary", "precision_macro", "recall_macro", "auroc"}
    wanted |= {"confusion_matrix", "classification_report", "total_samples", "per_criterion_f1"}
    assert set(found["criteria"]) == wanted
    assert np.sum(found["criteria"]["confusion_matrix"]) == found["rows"] == 16
    assert {"span_em", "span_f1", "squad_em", "squad_f1"} <= set(found["evidence"])
    assert found["joint_score"] == pytest.approx((found["criteria"]["f1_binary"] + found["evidence"]["span_em"]) / 2)


def test_a_report_does_not_depend_on_the_padding(tmp_path):
    _, fixed, (model, _, config) = written("criteria", tmp_path / "fixed")
    _, buckets, _ = written("criteria", tmp_path / "buckets", padding="buckets")
    assert fixed["criteria"] == buckets["criteria"]


def test_a_criteria_report_has_the_originals_fields_at_its_top(tmp_path):
    found = written("criteria", tmp_path)[1]
    assert found["total_samples"] == found["rows"]
    assert found["criteria"].items() <= found.items()


def test_another_dataset_is_not_reported_on(tmp_path):
    _, _, (model, source, config) = written("criteria", tmp_path)
    foreign = ArraySource({name: column[:3] for name, column in source.columns.items()})
    with pytest.raises(ValueError, match="the config's own data"):
        TASKS["criteria"].report(model, foreign, config, tmp_path)
