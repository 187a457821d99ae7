"""The originals' recorded numbers, replayed through the code that trains."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.parity import fmri_autoencoder
from tests.parity.replay import replay

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fmri_autoencoder"
CASES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
TRAINED = ("gen1_small", "head_encodec_small", "head_mel1_small")
LIMITS = {"out": 1e-5, "loss": 1e-5, "grad": 1e-4, "after3": 1e-3}  # relative L2 by tensor
OWN_LIMITS = {  # relative, by the beginning of the key
    "fmri/features": 1e-4,  # voxels of about 1000 are centred with a mean kept in float32
}
FLOOR = 2e-6  # absolute: differences of exact zeros and sums that cancel
ROUNDING = 2  # times the original's own distance from its float64 self, where the case records one
CHAOS = ("final", "trainer")  # later than three steps a turned ReLU decides: the original's float32 leaves its float64


def opened(name: str) -> tuple[dict, dict]:
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")


def kind_of(key: str) -> str:
    """`out_train/video_recon` and `combined_1/out/total` are both `out`."""
    return next((kind for kind in LIMITS for part in key.split("/")[:2] if part.startswith(kind)), "out")


def limits(key: str, case: dict) -> tuple[float, float]:
    """(relative, absolute): a tensor must keep one of them."""
    kind, (stage, name) = kind_of(key), (key.split("/")[0], key.split("/")[-1])
    own = case.get("float32_vs_float64", {})
    if stage == "out_train":
        return LIMITS[kind], max(FLOOR, ROUNDING * own.get("out_max_abs", {}).get(name, 0))
    if kind == "grad":
        return max(
            LIMITS[kind], ROUNDING * max([error for error, _ in own.get("worst_grad_rel_l2", [])], default=0)
        ), FLOOR
    if kind == "after3":
        return LIMITS[kind], 10 * case["after3_float32_vs_float64_max_abs"].get(name, 0) + 1e-6
    if stage.startswith("loss") and "loss_rel" in own:
        return max(LIMITS[kind], ROUNDING * own["loss_rel"]), FLOOR
    return LIMITS[kind], FLOOR


@pytest.mark.parametrize("name", CASES)
def test_every_recorded_tensor_is_reproduced(name):
    case, tensors = opened(name)
    got, noise = replay(case, tensors, name), set(case.get("zero_true_gradient", ()))
    off = {}
    for key in case["expects"]:
        stage, parameter = key.split("/")[0], key.split("/")[-1]
        if stage in CHAOS or (stage in ("grad", "after3") and parameter in noise):
            continue
        a, b = (np.asarray(value, np.float64).reshape(-1) for value in (got[key], tensors[key]))
        assert a.size == b.size, key
        top, error = np.abs(a - b).max(initial=0), np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6)
        relative, absolute = limits(key, case)
        relative = max([relative, *(limit for start, limit in OWN_LIMITS.items() if key.startswith(start))])
        if error > relative and top > absolute:
            off[key] = error, top
    assert not off
    # The original's float32 holds rounding noise here, up to 3e-4, which Adam turns into steps.
    if "train mode" in case.get("grad_of", ""):
        assert not any(got[f"grad/{key}"].any() for key in case["bias_before_batchnorm"])


@pytest.mark.parametrize("name", TRAINED)
def test_training_in_float64_follows_the_original_in_float64(name):
    case, tensors = opened(name)
    wanted = case["trainer_loss_per_step_float64"]
    got = fmri_autoencoder.losses_in_float64(case, {k: v for k, v in tensors.items() if k not in case["expects"]})
    assert got[0] == pytest.approx(wanted[0], rel=1e-13)
    np.testing.assert_allclose(got, wanted, rtol=5e-5)  # the weights between the steps are float32


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_recognised_by_its_content(name):
    assert fmri_autoencoder.claims("another_name", opened(name)[0])
