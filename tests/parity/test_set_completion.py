"""The original's recorded numbers, replayed through the code that trains."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.parity import set_completion
from tests.parity.replay import replay

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "set_completion"
CASES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
LIMITS = {"out": 1e-5, "loss": 1e-5, "grad": 1e-4, "grad_in": 1e-4, "later": 1e-3}


def relative_errors(got: dict, case: dict, tensors: dict) -> dict[str, float]:
    """Relative L2 error by tensor over its limit; what the case marks as round-off is left out of later parameters."""
    errors = {}
    for key in case["expects"]:
        kind, name = key.split("/", 1)
        a, b = np.nan_to_num(np.float64(got[key])), np.nan_to_num(np.float64(tensors[key]))
        assert a.size == b.size, key
        assert np.array_equal(np.isnan(got[key]), np.isnan(tensors[key])), key
        if kind not in LIMITS:
            if name.endswith("in_proj_bias"):  # the key third has no true gradient: AdamW amplifies its rounding noise
                continue
            stable = 1 - tensors.get(f"unstable/{name}", np.zeros(b.shape))
            a, b = a.reshape(b.shape) * stable, b * stable
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6) if np.abs(a - b).max(initial=0) > 2e-6 else 0.0
        errors[key] = error / LIMITS.get(kind, LIMITS["later"])
    return errors


@pytest.mark.parametrize("name", CASES)
def test_every_recorded_tensor_is_reproduced(name):
    case, tensors = json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")
    got = replay(case, tensors, name)
    errors = relative_errors(got, case, tensors)
    assert max(errors.values()) <= 1, max(errors.items(), key=lambda item: item[1])


def test_cases_of_other_systems_are_not_claimed():
    assert not set_completion.claims("setcompletion_ln", {"config": {"hidden_dim": 16}, "expects": {}})
