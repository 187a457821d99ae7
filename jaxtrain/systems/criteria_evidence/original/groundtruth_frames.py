"""Ground-truth tables of `groundtruth` as pandas DataFrames, and the files that the original's script writes."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.original import groundtruth, loaders
from jaxtrain.systems.criteria_evidence.original.groundtruth import CRITERIA_COLUMNS, EVIDENCE_COLUMNS, FIELD_MAP


class LeakedColumn(UserError, AssertionError):
    """Raised if one table has columns of the other; also an AssertionError."""


def create_criteria_groundtruth(
    annotations: Any,
    posts: Any,
    field_map: Mapping[str, Any] = FIELD_MAP,
    valid_criterion_ids: Iterable[str] = (),
    output_path: str | pathlib.Path | None = None,
) -> Any:
    """Return post_id, criterion_id, status, label from two DataFrames; reads `status`, never `cases`.

    output_path: also write it as CSV. Raises the errors of groundtruth.criteria_table. Needs pandas.
    """
    rows, columns = _records(annotations), getattr(annotations, "columns", ())
    rows = groundtruth.criteria_table(rows, _records(posts), valid_criterion_ids, field_map, columns)
    return _frame(rows, CRITERIA_COLUMNS, output_path)


def create_evidence_groundtruth(
    annotations: Any,
    posts: Any,
    field_map: Mapping[str, Any] = FIELD_MAP,
    valid_criterion_ids: Iterable[str] = (),
    output_path: str | pathlib.Path | None = None,
) -> Any:
    """Return post_id, criterion_id, case_id, evidence_text, start_char, end_char, sentence_id; reads `cases` only.

    output_path: also write it as CSV. Raises the errors of groundtruth.evidence_table. Needs pandas.
    """
    rows, columns = _records(annotations), getattr(annotations, "columns", ())
    rows = groundtruth.evidence_table(rows, _records(posts), valid_criterion_ids, field_map, columns)
    return _frame(rows, EVIDENCE_COLUMNS, output_path)


def validate_strict_separation(criteria: Any, evidence: Any) -> None:
    """Raise LeakedColumn (a ValueError and an AssertionError) if evidence has `status`, or criteria has passages."""
    try:
        groundtruth.validate_strict_separation(*(_with_columns(table) for table in (criteria, evidence)))
    except UserError as error:
        raise LeakedColumn(str(error)) from None


def make_groundtruth(
    annotations: Any, posts: Any, valid_criterion_ids: Iterable[str], output_dir: str | pathlib.Path, seed: int = 42
) -> dict[str, pathlib.Path]:
    """Write criteria_groundtruth.csv, evidence_groundtruth.csv and splits.json to output_dir; return paths by name."""
    folder, ids = pathlib.Path(output_dir), list(valid_criterion_ids)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}_groundtruth.csv" for name in ("criteria", "evidence")}
    criteria = create_criteria_groundtruth(annotations, posts, valid_criterion_ids=ids, output_path=paths["criteria"])
    evidence = create_evidence_groundtruth(annotations, posts, valid_criterion_ids=ids, output_path=paths["evidence"])
    validate_strict_separation(criteria, evidence)
    paths["splits"] = folder / "splits.json"
    loaders.save_splits_json(*loaders.group_split_by_post_id(posts, random_seed=seed), paths["splits"], seed=seed)
    return paths


def load_field_map(path: str | pathlib.Path) -> dict[str, Any]:
    """Read a configs/data/field_map.yaml as a dict; missing entries take the original's values."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(FIELD_MAP), OmegaConf.load(path)), resolve=True)
    return dict(found)  # type: ignore[arg-type]


def load_dsm_criteria(path: str | pathlib.Path) -> list[dict[str, str]]:
    """Return the entries of a dsm_criteria.json: [{"id": ..., "text": ...}]."""
    return list(json.loads(pathlib.Path(path).read_text(encoding="utf-8")))


def _records(table: Any) -> list[dict[str, Any]]:
    return table.to_dict("records") if hasattr(table, "columns") else [dict(row) for row in table]


def _with_columns(table: Any) -> list[dict[str, Any]]:
    """Return the rows; for an empty DataFrame, one row of None with its columns, so that the columns are checked."""
    return _records(table) or [dict.fromkeys(getattr(table, "columns", ()))]


def _frame(rows: list[dict[str, Any]], columns: tuple[str, ...], path: str | pathlib.Path | None) -> Any:
    import pandas

    frame = pandas.DataFrame(rows, columns=list(columns))
    if path is not None:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(path, index=False)
    return frame
