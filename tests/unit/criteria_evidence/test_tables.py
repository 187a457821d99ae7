"""Splits, ground truth, alignment, scores and predictions against the original's recorded tables."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import csv_files, decoding, metrics, splits, tokenization
from jaxtrain.systems.criteria_evidence.examples import find_answer_span, token_span_from_char
from jaxtrain.systems.criteria_evidence.original import groundtruth
from jaxtrain.train.loop.early_stop import EarlyStopping
from tests.parity.criteria_heads import span_evaluations
from tests.unit.criteria_evidence.golden import FOLDER, assert_near, table

CLASSIFICATION = table("metrics_classification")["cases"]
nan = float("nan")


def outcome(function, *arguments):
    try:
        return list(function(*arguments))
    except ValueError as error:
        return f"ValueError: {error}"


@pytest.mark.parametrize("case", table("splits")["random_split_80_10_10"], ids=lambda c: f"{c['n']}-{c['seed']}")
def test_random_split_gives_torchs_rows(case):
    found = splits.random_split(case["n"], case["seed"])
    assert [found["train"], found["validation"], found["test"]] == [case["train"], case["val"], case["test"]]


@pytest.mark.parametrize("case", table("splits")["group_split_70_15_15"], ids=lambda c: f"{c['n']}-{c['seed']}")
def test_group_split_gives_the_originals_posts(case):
    found = splits.group_names_split([f"s_{i}" for i in range(case["n"])], case["seed"], (0.7, 0.15, 0.15))
    assert [found["train"], found["validation"], found["test"]] == [case["train"], case["val"], case["test"]]


def test_a_post_in_two_splits_is_named_as_leakage():
    with pytest.raises(UserError, match="Data leakage: 1 posts are in both train and test"):
        splits.check_disjoint({"train": ["a", "b"], "validation": ["c"], "test": ["b"]})


def test_ground_truth_tables_are_the_originals():
    case = table("groundtruth")
    arguments = (case["annotations"], case["posts"], case["valid_criterion_ids"], case["field_map"])
    assert groundtruth.criteria_table(*arguments) == case["criteria"]
    assert groundtruth.evidence_table(*arguments) == case["evidence"]
    groundtruth.validate_strict_separation(case["criteria"], case["evidence"])


@pytest.mark.parametrize(("text", "label"), table("groundtruth")["normalize_status"])
def test_a_status_means_what_the_original_reads(text, label):
    assert groundtruth.normalize_status(eval(text)) == label


@pytest.mark.parametrize(("text", "cases"), table("groundtruth")["parse_cases"])
def test_cases_are_parsed_as_the_original_does(text, cases):
    assert groundtruth.parse_cases(eval(text)) == cases


def test_ground_truth_mistakes_are_named():
    posts, known = [{"post_id": "p"}], ["A"]
    row = {"post_id": "p", "criterion_id": "Z", "status": "present", "cases": "[]"}
    with pytest.raises(UserError, match="criterion_id Z not among the criteria"):
        groundtruth.criteria_table([row], posts, known)
    with pytest.raises(UserError, match="missing columns cases"):
        groundtruth.evidence_table([{"post_id": "p", "criterion_id": "A"}], posts, known)
    with pytest.raises(UserError, match="`status`"):
        groundtruth.validate_strict_separation([], [{"status": 1}])
    swapped = {**groundtruth.FIELD_MAP, "annotations": {"status": "cases"}}
    with pytest.raises(AssertionError):
        groundtruth.criteria_table([row], posts, known, swapped)


@pytest.mark.parametrize(("context", "answer", "place"), table("data_pipeline")["find_answer_span"])
def test_an_answer_is_found_where_the_original_finds_it(context, answer, place):
    assert outcome(find_answer_span, context, answer) == place


@pytest.mark.parametrize(("start", "end", "tokens"), table("data_pipeline")["token_span_from_char"]["cases"])
def test_characters_become_the_originals_tokens(start, end, tokens):
    offsets = [tuple(pair) for pair in table("data_pipeline")["token_span_from_char"]["offsets"]]
    assert outcome(token_span_from_char, offsets, start, end) == tokens


def test_criterion_texts_are_the_originals():
    rows = csv_files.read_rows(FOLDER / "fixture" / "redsm5_annotations.csv", ["status"])
    texts = csv_files.read_criteria(FOLDER / "fixture" / "dsm_criteria.json")
    assert [csv_files.criterion_text(row, texts) for row in rows] == table("data_pipeline")["criterion_text_per_row"]


@pytest.mark.parametrize("case", CLASSIFICATION, ids=lambda case: case["name"])
def test_validation_scores_are_the_originals(case):
    assert_near(metrics.validation_scores(case["logits"], case["labels"], case["batch_size"]), case["Trainer.validate"])


@pytest.mark.parametrize("kind", ["criteria", "evidence"])
@pytest.mark.parametrize("case", CLASSIFICATION, ids=lambda case: case["name"])
def test_evaluator_scores_are_the_originals(case, kind):
    arguments = (kind, case["logits"], case["labels"], case["batch_size"], case.get("criterion_ids", ()))
    arguments += ([str(index) for index in range(len(case["logits"][0]))],)
    if isinstance(case[f"Evaluator.{kind}"], str):
        with pytest.raises(ValueError, match="Number of classes"):
            metrics.evaluator_scores(*arguments)
    else:
        assert_near(metrics.evaluator_scores(*arguments), case[f"Evaluator.{kind}"])


@pytest.mark.parametrize("case", [c for c in CLASSIFICATION if len(c["logits"][0]) == 2], ids=lambda case: case["name"])
def test_evaluation_report_is_the_originals_where_it_gives_one(case):
    predictions = np.argmax(case["logits"], axis=-1)
    found = metrics.evaluation_scores(case["labels"], predictions, metrics.softmax(case["logits"]))
    assert found["total_samples"] == len(case["labels"])  # also where the original raises
    if not isinstance(case["eval_criteria.evaluate_model"], str):
        assert set(found) == set(case["eval_criteria.evaluate_model"])
        both_classes = len({*case["labels"], *predictions.tolist()}) == 2
        if both_classes:
            assert_near(found, case["eval_criteria.evaluate_model"])
    assert_near(metrics.engine_scores(case["labels"], predictions), case["engine._classification_metrics"])


def test_an_evaluator_without_class_names_makes_no_report_and_takes_a_single_class():
    found = metrics.evaluator_scores("criteria", [[0.0, 1.0], [0.0, 2.0]], [1, 1], 2)
    assert found["accuracy"] == 1.0
    assert "classification_report" not in found


def test_an_unknown_evaluator_task_raises_typeerror_as_the_original():
    with pytest.raises(TypeError):
        metrics.evaluator_scores("other", [[0.0, 1.0]], [1], 1)


def test_span_and_joint_scores_are_the_originals():
    case, tensors = table("metrics_span"), load_file(FOLDER / "metrics_span.safetensors")
    for name, found in span_evaluations(case, tensors).items():
        assert_near(found, case[name])


def test_a_run_of_both_tasks_reports_the_engines_scores():
    case, tensors = table("metrics_span"), load_file(FOLDER / "metrics_span.safetensors")
    names = {"labels": "labels", "probabilities": "cls_logits"}
    names |= {"true_starts": "start_positions", "true_ends": "end_positions"}
    rows = {key: tensors[f"in/{name}"] for key, name in names.items()}
    rows |= {"starts": tensors["in/start_logits"].argmax(-1), "ends": tensors["in/end_logits"].argmax(-1)}
    found = metrics.compute({}, rows, None)
    want = {key: value for key, value in case["share._evaluate"].items() if key != "loss"}
    assert_near({key: found[key] for key in want}, want)


@pytest.mark.parametrize("case", table("early_stopping")["cases"])
def test_early_stopping_follows_the_originals_trace(case):
    best, improved = EarlyStopping("x", case["mode"], case["min_delta"], case["patience"]), []
    for value in case["values"]:
        before = best.reference
        best.update(value)
        improved.append(best.reference != before)
        if best.stop:
            break
    assert improved == case["improved_per_epoch"]
    assert best.reference == case["result"]["best_val_x"]  # the original's best moves by more than min_delta only


def fake_model(batch):
    """The golden's rule: logits from the ids and their places."""
    ids = batch.get("input_ids", batch.get("criteria_input_ids"))
    logits = np.stack([0.05 * ids.mean(1), 0.02 * ids.max(1)], axis=1)
    ids = batch.get("input_ids", batch.get("evidence_input_ids"))
    place = np.arange(ids.shape[1])
    return {
        "logits": logits,
        "start_logits": (ids * 37 + place * 11) % 53,
        "end_logits": (ids * 11 + place * 37) % 53,
    }


@pytest.mark.parametrize("architecture", ["criteria", "evidence", "share", "joint"])
def test_predictions_are_the_originals(architecture):
    case = table("predict_decode")
    tokenizer, length = tokenization.load(FOLDER / "fixture" / "tokenizer.json"), case["max_length"]
    texts = case["texts"]
    if architecture == "joint":
        texts = [{key: row[key] for key in ("sentence", "context")} for row in case["joint"]]
    assert_near(decoding.predict(architecture, fake_model, tokenizer, texts, length, length), case[architecture])


@pytest.mark.parametrize("architecture", ["criteria", "evidence", "share", "joint"])
def test_no_texts_have_no_predictions(architecture):
    tokenizer = tokenization.load(FOLDER / "fixture" / "tokenizer.json")
    assert decoding.predict(architecture, fake_model, tokenizer, []) == []


def test_squad_scores_ignore_case_punctuation_and_articles():
    assert metrics.answer_em("The sad man.", "sad man") == 1.0
    assert metrics.answer_f1("very sad man", "a sad man today") == pytest.approx(2 * 2 / (3 + 3))
    assert metrics.answer_f1("", "sad") == 0.0
    assert metrics.answer_f1("the", "") == 1.0


def test_span_f1_is_the_share_of_common_tokens():
    assert metrics.span_f1([2], [5], [4], [7]) == pytest.approx(2 * 2 / 8)
    assert metrics.span_f1([5], [3], [4], [7]) == 0.0
