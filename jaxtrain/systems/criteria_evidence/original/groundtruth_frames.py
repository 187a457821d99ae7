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
    field_map: Mapping[str, Any],
    valid_criterion_ids: Iterable[str] | None = None,
    *,
    output_path: str | pathlib.Path | None = None,
) -> Any:
    """Return post_id, criterion_id, status, label from two DataFrames; reads `status`, never `cases`.

    valid_criterion_ids: None takes any. output_path: also write it as CSV. Raises the errors of
    groundtruth.criteria_table. Needs pandas.
    """
    rows, columns = _records(annotations), getattr(annotations, "columns", ())
    rows = groundtruth.criteria_table(
        rows, _records(posts), _ids(valid_criterion_ids, rows, field_map), field_map, columns
    )
    return _frame(rows, CRITERIA_COLUMNS, output_path)


def create_evidence_groundtruth(
    annotations: Any,
    posts: Any,
    field_map: Mapping[str, Any],
    valid_criterion_ids: Iterable[str] | None = None,
    *,
    output_path: str | pathlib.Path | None = None,
) -> Any:
    """Return post_id, criterion_id, case_id, evidence_text, start_char, end_char, sentence_id; reads `cases` only.

    valid_criterion_ids: None takes any. output_path: also write it as CSV. Raises the errors of
    groundtruth.evidence_table. Needs pandas.
    """
    rows, columns = _records(annotations), getattr(annotations, "columns", ())
    rows = groundtruth.evidence_table(
        rows, _records(posts), _ids(valid_criterion_ids, rows, field_map), field_map, columns
    )
    return _frame(rows, EVIDENCE_COLUMNS, output_path)


def validate_strict_separation(criteria_df: Any, evidence_df: Any, field_map: Mapping[str, Any]) -> None:
    """Raise LeakedColumn (a ValueError and an AssertionError) if evidence has `status`, or criteria has passages.

    field_map: not read, because the tables' columns have fixed names.
    """
    try:
        groundtruth.validate_strict_separation(*(_with_columns(table) for table in (criteria_df, evidence_df)))
    except UserError as error:
        raise LeakedColumn(str(error)) from None


def make_groundtruth(
    annotations: Any, posts: Any, valid_criterion_ids: Iterable[str], output_dir: str | pathlib.Path, seed: int = 42
) -> dict[str, pathlib.Path]:
    """Write criteria_groundtruth.csv, evidence_groundtruth.csv and splits.json to output_dir; return paths by name."""
    folder, ids = pathlib.Path(output_dir), list(valid_criterion_ids)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}_groundtruth.csv" for name in ("criteria", "evidence")}
    criteria = create_criteria_groundtruth(annotations, posts, FIELD_MAP, ids, output_path=paths["criteria"])
    evidence = create_evidence_groundtruth(annotations, posts, FIELD_MAP, ids, output_path=paths["evidence"])
    validate_strict_separation(criteria, evidence, FIELD_MAP)
    paths["splits"] = folder / "splits.json"
    loaders.save_splits_json(*loaders.group_split_by_post_id(posts, random_seed=seed), paths["splits"], {"seed": seed})
    return paths


def load_field_map(config_path: str | pathlib.Path) -> dict[str, Any]:
    """Read a configs/data/field_map.yaml as a dict; missing entries take the original's values."""
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.create(FIELD_MAP), OmegaConf.load(config_path)), resolve=True
    )
    return dict(content)  # type: ignore[arg-type]


def load_dsm_criteria(path: str | pathlib.Path) -> list[dict[str, str]]:
    """Return the entries of a dsm_criteria.json: [{"id": ..., "text": ...}]."""
    return list(json.loads(pathlib.Path(path).read_text(encoding="utf-8")))


class GroundTruthValidator:
    """Checks of finished tables: their columns, labels and criteria. Both methods raise ValueError, or return True."""

    def __init__(self, field_map: Mapping[str, Any], valid_criterion_ids: Iterable[str]):
        self.field_map, self.valid_criterion_ids = field_map, set(valid_criterion_ids)

    def validate_criteria_groundtruth(self, df: Any) -> bool:
        """Check post_id, criterion_id, status and label (0 or 1), known criteria, and that no passage is there."""
        self._columns(df, CRITERIA_COLUMNS)
        validate_strict_separation(df, [], self.field_map)
        wrong = sorted({str(value) for value in df["label"]} - {"0", "1", "0.0", "1.0"})
        if wrong:
            raise UserError(f"criteria ground truth: label {', '.join(wrong[:5])}, wanted 0 or 1")
        return True

    def validate_evidence_groundtruth(self, df: Any) -> bool:
        """Check the columns of passages, known criteria, and that no status is there."""
        self._columns(df, EVIDENCE_COLUMNS)
        validate_strict_separation([], df, self.field_map)
        return True

    def _columns(self, df: Any, names: Iterable[str]) -> None:
        absent = [name for name in names if name not in df.columns]
        if absent:
            raise UserError(f"ground truth: missing columns {', '.join(absent)}; it has {', '.join(df.columns)}")
        unknown = sorted({str(one) for one in df["criterion_id"] if one not in self.valid_criterion_ids})
        if unknown:
            raise UserError(f"ground truth: criterion_id {', '.join(unknown[:5])} not among the criteria")


def normalize_status_value(value: Any, status_map: Mapping[str, Any]) -> int | None:
    """Return 1 for a positive status, 0 for a negative one, None for anything else; status_map: `status_values`."""
    return groundtruth.normalize_status(value, status_map)


def parse_cases_field(cases_value: Any) -> list[Any]:
    """Return the supporting passages as a list, as groundtruth.parse_cases does."""
    return groundtruth.parse_cases(cases_value)


def _ids(ids: Iterable[str] | None, rows: list[dict[str, Any]], field_map: Mapping[str, Any]) -> Iterable[str]:
    """Return the known criteria: the given ones, or all that occur."""
    return [row.get(field_map["annotations"]["criterion_id"]) for row in rows] if ids is None else ids


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
