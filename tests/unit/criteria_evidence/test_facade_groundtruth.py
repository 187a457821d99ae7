"""Ground truth of DataFrames, as the original's users make it."""

import math

import pytest

from jaxtrain.systems import criteria_evidence as psy
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
    groundtruth_frames.validate_strict_separation(criteria, evidence, values["field_map"])
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match="`status` column"):
            groundtruth_frames.validate_strict_separation(
                criteria, evidence.assign(status="present"), values["field_map"]
            )
    with pytest.raises(ValueError, match="criterion_id B, D not among the criteria"):
        groundtruth_frames.create_criteria_groundtruth(**given(valid_criterion_ids=["A"])[1])
    field_map = {**values["field_map"], "annotations": {**values["field_map"]["annotations"], "status": "cases"}}
    with pytest.raises(AssertionError, match="reads the column `status`"):
        groundtruth_frames.create_criteria_groundtruth(**given(field_map=field_map)[1])


def test_the_folder_of_a_table_is_made(tmp_path):
    path = tmp_path / "processed" / "criteria.csv"
    groundtruth_frames.create_criteria_groundtruth(**given(output_path=path)[1])
    assert path.is_file()


def test_finished_tables_are_validated_and_their_faults_named():
    values = given()[1]
    check = psy.GroundTruthValidator(values["field_map"], values["valid_criterion_ids"])
    criteria = psy.create_criteria_groundtruth(**values)
    evidence = psy.create_evidence_groundtruth(**values)
    assert check.validate_criteria_groundtruth(criteria)
    assert check.validate_evidence_groundtruth(evidence)
    for wrong, words in (
        (criteria.assign(label=2), "label 2, wanted 0 or 1"),
        (criteria.assign(criterion_id="Z"), "criterion_id Z"),
        (criteria.drop(columns="label"), "missing columns label"),
        (criteria.assign(cases=""), "evidence columns"),
    ):
        with pytest.raises(ValueError, match=words):
            check.validate_criteria_groundtruth(wrong)
    with pytest.raises(ValueError, match="status"):
        check.validate_evidence_groundtruth(evidence.assign(status=1))


def test_posts_annotations_and_criteria_are_read_from_files(tmp_path):
    values = given()[1]
    values["posts"].to_csv(tmp_path / "posts.csv", index=False)
    values["annotations"].to_csv(tmp_path / "annotations.csv", index=False)
    (tmp_path / "dsm.json").write_text('[{"id": "A", "text": "low mood"}, {"id": "B", "text": ""}]')
    loader = psy.ReDSM5DataLoader(values["field_map"], data_dir=tmp_path)
    assert len(loader.load_posts()) == len(values["posts"])
    assert len(loader.load_annotations()) == len(values["annotations"])
    assert loader.get_valid_criterion_ids(tmp_path / "dsm.json") == {"A", "B"}
    criteria = psy.DSMCriteriaLoader(tmp_path / "dsm.json")
    assert criteria.get_criterion_by_id("A") == {"id": "A", "text": "low mood"}
    assert criteria.get_criterion_by_id("C") is None
    (tmp_path / "posts.csv").unlink()
    with pytest.raises(FileNotFoundError, match="posts.csv"):
        loader.load_posts()
    for options in ({"data_source": "s3"}, {"data_source": "huggingface"}, {}):
        with pytest.raises(ValueError, match="data_source|hf_dataset_name|data_dir"):
            psy.ReDSM5DataLoader(values["field_map"], **options)


def test_none_takes_every_criterion():
    values = given(valid_criterion_ids=None)[1]
    assert len(psy.create_criteria_groundtruth(**values)) >= len(given()[0]["criteria"])
