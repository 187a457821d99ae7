"""Ground truth of DataFrames, as the original's users make it."""

import math

import pytest

from jaxtrain.systems.criteria_evidence.original import groundtruth_frames, loaders
from tests.unit.criteria_evidence.golden import table

pandas = pytest.importorskip("pandas")


def given(**changes):
    case = table("groundtruth")
    ids = case["valid_criterion_ids"]
    tables = {"annotations": pandas.DataFrame(case["annotations"]), "posts": pandas.DataFrame(case["posts"])}
    return case, {**tables, "field_map": case["field_map"], "valid_criterion_ids": ids, **changes}


def rows(frame) -> list[dict]:
    none = lambda value: None if isinstance(value, float) and math.isnan(value) else value
    return [{key: none(value) for key, value in row.items()} for row in frame.to_dict("records")]


def test_both_tables_are_the_originals_and_are_written(tmp_path):
    case, values = given()
    assert rows(groundtruth_frames.create_criteria_groundtruth(**values)) == case["criteria"]
    assert rows(groundtruth_frames.create_evidence_groundtruth(**values)) == case["evidence"]
    posts = pandas.DataFrame({"post_id": [f"p{i}" for i in range(1, 21)], "text": ""})
    paths = groundtruth_frames.make_groundtruth(values["annotations"], posts, values["valid_criterion_ids"], tmp_path)
    assert len(pandas.read_csv(paths["criteria"])) == len(case["criteria"])
    assert len(loaders.load_splits_json(paths["splits"])["train"]) == 14


def test_annotations_without_rows_give_tables_without_rows():
    values = given()[1]
    empty = {**values, "annotations": values["annotations"][:0]}
    criteria = groundtruth_frames.create_criteria_groundtruth(**empty)
    assert (list(criteria.columns), len(criteria)) == (list(groundtruth_frames.CRITERIA_COLUMNS), 0)
    evidence = groundtruth_frames.create_evidence_groundtruth(**empty)
    assert (list(evidence.columns), len(evidence)) == (list(groundtruth_frames.EVIDENCE_COLUMNS), 0)
    with pytest.raises(ValueError, match="missing columns status"):
        groundtruth_frames.create_criteria_groundtruth(
            **{**empty, "annotations": empty["annotations"].drop(columns="status")}
        )


def test_a_missing_value_of_pandas_is_no_status():
    assert groundtruth_frames.groundtruth.normalize_status(pandas.NA) is None


def test_leaks_and_unknown_ids_are_refused():
    values = given()[1]
    criteria = groundtruth_frames.create_criteria_groundtruth(**values)
    evidence = groundtruth_frames.create_evidence_groundtruth(**values)
    groundtruth_frames.validate_strict_separation(criteria, evidence)
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match="`status` column"):
            groundtruth_frames.validate_strict_separation(criteria, evidence.assign(status="present"))
    with pytest.raises(ValueError, match="criterion_id B, D not among the criteria"):
        groundtruth_frames.create_criteria_groundtruth(**given(valid_criterion_ids=["A"])[1])
    field_map = {**values["field_map"], "annotations": {**values["field_map"]["annotations"], "status": "cases"}}
    with pytest.raises(AssertionError, match="reads the column `status`"):
        groundtruth_frames.create_criteria_groundtruth(**given(field_map=field_map)[1])


def test_the_folder_of_a_table_is_made(tmp_path):
    path = tmp_path / "processed" / "criteria.csv"
    groundtruth_frames.create_criteria_groundtruth(**given(output_path=path)[1])
    assert path.is_file()
