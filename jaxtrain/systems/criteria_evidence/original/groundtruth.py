"""Make ground-truth tables from posts and annotations; the criteria table reads only `status`, evidence only `cases`.

Rows are plain dicts; None and NaN are missing values.
"""

import ast
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError

log = logging.getLogger(__name__)

FIELD_MAP: dict[str, Any] = {
    "posts": {"post_id": "post_id", "text": "text", "user_id": "user_id", "created_at": "created_at"},
    "annotations": {"post_id": "post_id", "criterion_id": "criterion_id", "status": "status", "cases": "cases"},
    "status_values": {
        "positive": ["positive", "present", "true", "1", 1, True],
        "negative": ["negative", "absent", "false", "0", 0, False],
    },
    "cases_structure": {
        "is_list": True,
        "fields": {"start_char": "start_char", "end_char": "end_char", "sentence_id": "sentence_id", "text": "text"},
    },
    "validation": {
        "strict_mode": True,
        "allow_cross_contamination": False,
        "fail_on_invalid_criterion_id": True,
        "fail_on_missing_post_id": True,
        "drop_duplicates": True,
        "warn_on_conflicts": True,
    },
}
CRITERIA_COLUMNS = ("post_id", "criterion_id", "status", "label")
EVIDENCE_COLUMNS = ("post_id", "criterion_id", "case_id", "evidence_text", "start_char", "end_char", "sentence_id")


def missing(value: Any) -> bool:
    """Return True for None, NaN and pandas' NA. NA is recognised by its type because comparing it is an error."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ == "NAType"


def normalize_status(value: Any, status_values: Mapping[str, Sequence] = FIELD_MAP["status_values"]) -> int | None:
    """Return 1 for present, 0 for absent, None for anything else.

    Values are compared as they are first (1.0 and True equal 1), then as text in any case.
    """
    if missing(value):
        return None
    for label, known in ((1, status_values["positive"]), (0, status_values["negative"])):
        if any(value == one for one in known):
            return label
    if isinstance(value, str):
        text = value.strip().lower()
        for label, known in ((1, status_values["positive"]), (0, status_values["negative"])):
            if any(text == str(one).strip().lower() for one in known if isinstance(one, str)):
                return label
    return None


def parse_cases(value: Any) -> list[Any]:
    """Return the supporting passages as a list: a list itself, [dict] for a dict, or a list written as JSON or Python.

    Anything else gives [].
    """
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, str):
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            parsed = read(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return parsed if isinstance(parsed, list) else []
    return []


def criteria_table(
    annotations: Sequence[Mapping[str, Any]],
    posts: Iterable[Mapping[str, Any]],
    criterion_ids: Iterable[str],
    field_map: Mapping[str, Any] = FIELD_MAP,
    columns: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Return rows of post_id, criterion_id, status, label; of repeated (post, criterion) pairs the first one is kept.

    columns: the annotations' columns, for a table without rows. Rows with an unknown status are dropped with a warning
    (labels are then floats, as in pandas). Raises UserError for a missing column, an unknown criterion or post;
    AssertionError if field_map maps status to another column.
    """
    names = field_map["annotations"]
    assert names.get("status") == "status", "criteria ground truth reads the column `status` and nothing else"
    read = _columns(annotations, names, ("post_id", "criterion_id", "status"), columns)
    rows = [{new: row.get(old) for new, old in read.items()} for row in annotations]
    for row in rows:
        row["label"] = normalize_status(row["status"], field_map["status_values"])
    labelled = [row for row in rows if row["label"] is not None]
    if len(labelled) < len(rows):
        log.warning(
            "%d of %d annotations have a status that means nothing; dropped", len(rows) - len(labelled), len(rows)
        )
        labelled = [{**row, "label": float(row["label"])} for row in labelled]
    labelled = _known(labelled, posts, criterion_ids, field_map)
    if not field_map["validation"].get("drop_duplicates", True):
        return labelled
    first: dict[tuple, dict] = {}
    for row in labelled:
        first.setdefault((row["post_id"], row["criterion_id"]), row)
    if len(first) < len(labelled):
        log.warning("%d annotations repeat a (post, criterion) pair; the first one is kept", len(labelled) - len(first))
    return list(first.values())


def evidence_table(
    annotations: Sequence[Mapping[str, Any]],
    posts: Iterable[Mapping[str, Any]],
    criterion_ids: Iterable[str],
    field_map: Mapping[str, Any] = FIELD_MAP,
    columns: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Return rows of post_id, criterion_id, case_id, evidence_text, start_char, end_char, sentence_id, one per passage.

    case_id counts the passages of a (post, criterion) pair from 0. columns, errors: as in `criteria_table`, with
    `cases` instead of status.
    """
    names = field_map["annotations"]
    assert names.get("cases") == "cases", "evidence ground truth reads the column `cases` and nothing else"
    read = _columns(annotations, names, ("post_id", "criterion_id", "cases"), columns)
    fields = field_map["cases_structure"]["fields"]
    counts: dict[tuple, int] = {}
    rows = []
    for annotation in annotations:
        post, criterion = annotation.get(read["post_id"]), annotation.get(read["criterion_id"])
        for case in parse_cases(annotation.get(read["cases"])):
            if not case:
                continue
            case = case if isinstance(case, Mapping) else {}
            number = counts[post, criterion] = counts.get((post, criterion), -1) + 1
            row = {"post_id": post, "criterion_id": criterion, "case_id": number}
            row["evidence_text"] = case.get(fields.get("text", "text"))
            row |= {name: case.get(fields.get(name, name)) for name in ("start_char", "end_char", "sentence_id")}
            rows.append(row)
    return _known(rows, posts, criterion_ids, field_map)


def validate_strict_separation(criteria: Sequence[Mapping], evidence: Sequence[Mapping]) -> None:
    """Raise UserError if the evidence table has `status` or the criteria table has columns of passages."""
    if any("status" in row for row in evidence):
        raise UserError("the evidence table has a `status` column: evidence must come from `cases` alone")
    leaked = {key for row in criteria for key in row} & (set(EVIDENCE_COLUMNS) - {"post_id", "criterion_id"})
    leaked |= {key for row in criteria for key in row} & {"cases"}
    if leaked:
        raise UserError(f"the criteria table has evidence columns ({', '.join(sorted(leaked))})")


def _columns(
    annotations: Sequence[Mapping], names: Mapping[str, str], required: Sequence[str], present: Iterable[str]
) -> dict[str, str]:
    columns = {name: names.get(name, name) for name in required}
    known = {*map(str, present), *(key for row in annotations for key in row)}
    absent = [column for column in columns.values() if column not in known]
    if absent:
        raise UserError(f"annotations: missing columns {', '.join(absent)}; they have {', '.join(sorted(known))}")
    return columns


def _known(rows: list[dict], posts: Iterable[Mapping], criterion_ids: Iterable[str], field_map: Mapping) -> list[dict]:
    rules, post_column = field_map["validation"], field_map["posts"].get("post_id", "post_id")
    post_ids, criterion_ids = {post[post_column] for post in posts}, set(criterion_ids)
    checks = (
        ("criterion_id", criterion_ids, rules.get("fail_on_invalid_criterion_id", True), "criteria"),
        ("post_id", post_ids, rules.get("fail_on_missing_post_id", True), "posts"),
    )
    for column, known, strict, where in checks:
        unknown = sorted({str(row[column]) for row in rows if row[column] not in known})
        if unknown and strict:
            raise UserError(f"annotations: {column} {', '.join(unknown[:5])} not among the {where}")
        if unknown:
            log.warning("%d %ss are not among the %s; their rows are dropped", len(unknown), column, where)
            rows = [row for row in rows if row[column] in known]
    return rows
