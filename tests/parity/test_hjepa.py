"""The original's recorded numbers, replayed through the code that trains."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.parity import hjepa
from tests.parity.replay import replay

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hjepa"
CASES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
LIMITS = {"out": 1e-5, "loss": 1e-5, "loss_masked": 1e-5, "loss_train": 1e-5, "grad": 1e-4, "after3": 1e-3}
FLOOR = 2e-6  # absolute: differences of exact zeros and sums that cancel
# Behind the frame encoder's BatchNorm over ten nearly equal rows: the original's own float32 gradients of these are
# 1.3e-4 (relative) off its float64 ones, and those of the two biases are nothing but rounding. Its outputs in training
# mode are 1.0e-5 off a replay in float64.
ILL_CONDITIONED = {"grad": 1e-3, "after3": 1e-2}
TRAINING_OUTPUTS = 2e-5
ROUNDING = ("frame_encoder.encoder.vit.norm.bias", "frame_encoder.projector.0.bias", "projector.1.bn.running_mean")


def excused(case: dict) -> set[str]:
    """Parameters whose gradient is zero up to rounding, which Adam amplifies, as the case itself says."""
    return set(case.get("float64_check", {}).get("after3_parameters_off_by_more_than_5e-6", {}))


def limit_of(kind: str, name: str, case: dict) -> float:
    if "lewm_kwargs" in case and kind in ILL_CONDITIONED and name.startswith("frame_encoder."):
        return np.inf if name.endswith(ROUNDING) else ILL_CONDITIONED[kind]
    if "lewm_kwargs" in case and kind == "out" and name.startswith("train/"):
        return TRAINING_OUTPUTS
    later = kind == "after3" and (name in excused(case) or name.endswith(("in_proj_bias", "qkv.bias")))
    return np.inf if later else LIMITS[kind]


@pytest.mark.parametrize("name", CASES)
def test_every_recorded_tensor_is_reproduced(name):
    case, tensors = json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")
    got = replay(case, tensors, name)
    worst = {}
    for key in case["expects"]:
        kind, _, rest = key.partition("/")
        a, b = (np.asarray(value, np.float64).reshape(-1) for value in (got[key], tensors[key]))
        assert a.size == b.size, key
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6) if np.abs(a - b).max(initial=0) > FLOOR else 0.0
        if error > limit_of(kind, rest, case):
            worst[key] = error
    assert not worst


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_recognised_by_its_content(name):
    assert hjepa.claims("another_name", json.loads((GOLDEN / f"{name}.json").read_text()))
