"""The recorded tables, and a comparison of nested values with a tolerance."""

import json
import math
import pathlib

FOLDER = pathlib.Path(__file__).parents[2] / "golden" / "criteria_evidence"


def table(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def assert_near(got, want, tolerance: float = 1e-6, where: str = "") -> None:
    """Equal in structure, numbers within the tolerance, NaN equal to NaN."""
    if isinstance(want, dict):
        assert set(got) == set(want), (where, set(got) ^ set(want))
        for key in want:
            assert_near(got[key], want[key], tolerance, f"{where}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_near(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(want, float):
        assert got == want or (math.isnan(got) and math.isnan(want)) or abs(got - want) <= tolerance, (where, got, want)
    else:
        assert got == want, (where, got, want)
