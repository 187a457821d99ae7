"""JSON that every parser can read. NaN and infinity, which JSON lacks, are written as null or, to be read back
(`dumps_whole`), as {"not finite": "nan"}."""

import json
import math
from collections.abc import Mapping
from typing import Any

FLOAT = "not finite"  # only key of the object that stands for NaN or infinity


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def dumps_whole(value: Any) -> str:
    return json.dumps(_whole(value), allow_nan=False)


def loads_whole(text: str | bytes) -> Any:
    """Read what `dumps_whole` wrote, or JSON with NaN in it. Raises ValueError."""
    return json.loads(text, object_hook=lambda found: float(found[FLOAT]) if found.keys() == {FLOAT} else found)


def loads(text: str | bytes) -> Any:
    """Read JSON. Raises ValueError for invalid JSON, also for one that nests deeper than Python's stack."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: str(float(value))}
    if isinstance(value, Mapping):
        return {key: _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
